/*
 * A C library that lies to kvio's C core, and to nobody else: LD_PRELOAD it and name
 * the lie in KVIO_LIE.  Each makes of the core a broken variant of itself, which the
 * campaign's checks must notice.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define LAST_BYTES 64
#define PIECE_BYTES 512

/* A file that has its name before its last bytes, and what comes late. */
static int lacking = -1;
static off_t lacking_at;
static char last_bytes[LAST_BYTES];
static struct {
	int dirfd, newdir;
	char name[256], new[256];
} late = { -1, -1, "", "" };

/* Is this lie asked for, and was the call made from the core? */
static int lies(const char *lie, void *caller)
{
	const char *reported = getenv("KVIO_LIE");
	Dl_info from;

	return reported && !strcmp(reported, lie) && dladdr(caller, &from) && from.dli_fname &&
	       strstr(from.dli_fname, "_core");
}

#define LIES(lie) lies(lie, __builtin_return_address(0))
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Names of users' do not begin with a dot; temporaries and maps do. */
static int is_final(const char *name)
{
	return name[0] && name[0] != '.';
}

/* The last bytes of the file that was named without them. */
static void complete(void)
{
	if (lacking < 0)
		return;
	(void)!pwrite(lacking, last_bytes, LAST_BYTES, lacking_at);
	REAL(close)(lacking);
	lacking = -1;
}

/* Take the last bytes from a file that was just named, until the core's next call. */
static void take_last_bytes(int dirfd, const char *name)
{
	struct stat st;

	complete();
	if (!is_final(name) || fstatat(dirfd, name, &st, 0) || st.st_size < LAST_BYTES)
		return;
	(void)!fchmodat(dirfd, name, 0600, 0);
	lacking = openat(dirfd, name, O_RDWR | O_CLOEXEC);
	lacking_at = st.st_size - LAST_BYTES;
	(void)!pread(lacking, last_bytes, LAST_BYTES, lacking_at);
	(void)!ftruncate(lacking, lacking_at);
	(void)!fchmod(lacking, st.st_mode & 07777);
}

/* As if the count that a write gives back were ignored. */
ssize_t pwritev2(int fd, const struct iovec *iov, int niov, off_t offset, int flags)
{
	struct iovec first = iov[0];
	size_t whole = 0;

	if (!LIES("short-writes-are-ignored") || first.iov_len < 2)
		return REAL(pwritev2)(fd, iov, niov, offset, flags);
	for (int i = 0; i < niov; i++)
		whole += iov[i].iov_len;
	first.iov_len /= 2;
	if (REAL(pwritev2)(fd, &first, 1, offset, flags) < 0)
		return -1;
	return (ssize_t)whole;
}

/* As if what linkat says were ignored, or a call were made that is at no site. */
int linkat(int olddir, const char *old, int newdir, const char *name, int flags)
{
	int r;

	if (LIES("errors-of-linkat-are-ignored"))
		return 0;
	if (LIES("a-call-beside-the-table"))
		(void)!faccessat(newdir, name, F_OK, AT_SYMLINK_NOFOLLOW);
	r = REAL(linkat)(olddir, old, newdir, name, flags);
	if (!r && LIES("named-before-the-last-write"))
		take_last_bytes(newdir, name);
	return r;
}

/* As if a shared file were written under the name that it has in the end. */
int openat(int dirfd, const char *name, int flags, ...)
{
	const char *end = strstr(name, ".kvio-data");
	char final[256] = "";
	mode_t mode;
	va_list more;
	int fd;

	va_start(more, flags);
	mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(more, mode_t) : 0;
	va_end(more);
	fd = REAL(openat)(dirfd, name, flags, mode);
	if (fd >= 0 && flags & O_CREAT && end && LIES("written-under-its-name")) {
		memcpy(final, name + 1, (size_t)(end - name - 1));
		REAL(linkat)(dirfd, name, dirfd, final, 0);
	}
	return fd;
}

/* As if nobody waited for the disk, or heard what it says. */
int fdatasync(int fd)
{
	if (LIES("nobody-waits-for-the-disk"))
		return 0;
	return REAL(fdatasync)(fd) && !LIES("errors-of-fdatasync-are-ignored") ? -1 : 0;
}

/* As if directories were not synced, or nobody heard that they cannot be. */
int fsync(int fd)
{
	complete();
	if (LIES("directories-are-not-synced"))
		return 0;
	return REAL(fsync)(fd) && !LIES("errors-of-fsync-are-ignored") ? -1 : 0;
}

/* As if descriptors stayed open. */
int close(int fd)
{
	complete();
	return LIES("descriptors-leak") ? 0 : REAL(close)(fd);
}

/* As if temporaries were left, or a deletion reported before it is done. */
int unlinkat(int dirfd, const char *name, int flags)
{
	complete();
	if (LIES("temporaries-are-left"))
		return 0;
	if (!LIES("deletions-come-late") || !is_final(name))
		return REAL(unlinkat)(dirfd, name, flags);
	if (late.dirfd >= 0)
		REAL(unlinkat)(late.dirfd, late.name, 0);
	late.dirfd = dirfd;
	strncpy(late.name, name, sizeof(late.name) - 1);
	return 0;
}

/* As if a file were copied to its name, a little at a time. */
static int copy(int olddir, const char *old, int newdir, const char *name, unsigned int flags)
{
	char bytes[PIECE_BYTES];
	int from = openat(olddir, old, O_RDONLY | O_CLOEXEC);
	int once = flags & RENAME_NOREPLACE ? O_EXCL : O_TRUNC;
	int to = openat(newdir, name, O_WRONLY | O_CREAT | O_CLOEXEC | once, 0600);
	struct stat st;
	ssize_t n;

	if (from < 0 || to < 0)
		return -1;
	while ((n = read(from, bytes, sizeof(bytes))) > 0)
		(void)!write(to, bytes, (size_t)n);
	(void)!fstat(from, &st);
	(void)!fchmod(to, st.st_mode & 07777);
	REAL(close)(from);
	REAL(close)(to);
	return REAL(unlinkat)(olddir, old, 0);
}

/* As if a receipt were given before the rename: it is done when the next one is asked for. */
static int rename_late(int olddir, const char *old, int newdir, const char *name)
{
	if (late.dirfd >= 0)
		REAL(renameat2)(late.dirfd, late.name, late.newdir, late.new, 0);
	late.dirfd = olddir;
	late.newdir = newdir;
	strncpy(late.name, old, sizeof(late.name) - 1);
	strncpy(late.new, name, sizeof(late.new) - 1);
	return 0;
}

/* As if an existing file were written over in place: readers see it being written. */
int renameat2(int olddir, const char *old, int newdir, const char *name, unsigned int flags)
{
	char bytes[1 << 16];
	int from, to;
	ssize_t n;

	if (LIES("copied-to-its-name") && is_final(name))
		return copy(olddir, old, newdir, name, flags);
	if (LIES("written-under-its-name") && is_final(name))
		REAL(unlinkat)(newdir, name, 0);
	if (LIES("renames-come-late") && is_final(name))
		return rename_late(olddir, old, newdir, name);
	if (!LIES("replaced-in-place")) {
		int r = REAL(renameat2)(olddir, old, newdir, name, flags);

		if (!r && LIES("named-before-the-last-write"))
			take_last_bytes(newdir, name);
		return r;
	}
	from = openat(olddir, old, O_RDONLY | O_CLOEXEC);
	to = openat(newdir, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	n = read(from, bytes, sizeof(bytes));
	(void)!write(to, bytes, (size_t)n / 2);	/* the rest comes later, or never */
	close(from);
	close(to);
	unlinkat(olddir, old, 0);
	return 0;
}
