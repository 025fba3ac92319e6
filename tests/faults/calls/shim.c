/*
 * A C library that lies to kvio's C core, and to nobody else: LD_PRELOAD it and name
 * the lie in KVIO_LIE.  Each makes of the core a broken variant of itself, which the
 * campaign's checks must notice.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* Is this lie told, and was the call made from the core? */
static int lies(const char *lie, void *caller)
{
	const char *told = getenv("KVIO_LIE");
	Dl_info from;

	return told && !strcmp(told, lie) && dladdr(caller, &from) && from.dli_fname &&
	       strstr(from.dli_fname, "_core");
}

#define LIES(lie) lies(lie, __builtin_return_address(0))
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

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
	if (LIES("errors-of-linkat-are-ignored"))
		return 0;
	if (LIES("a-call-beside-the-table"))
		(void)!faccessat(newdir, name, F_OK, AT_SYMLINK_NOFOLLOW);
	return REAL(linkat)(olddir, old, newdir, name, flags);
}

/* As if nobody waited for the disk. */
int fdatasync(int fd)
{
	return LIES("nobody-waits-for-the-disk") ? 0 : REAL(fdatasync)(fd);
}

/* As if directories were not synced. */
int fsync(int fd)
{
	return LIES("directories-are-not-synced") ? 0 : REAL(fsync)(fd);
}

/* As if descriptors stayed open. */
int close(int fd)
{
	return LIES("descriptors-leak") ? 0 : REAL(close)(fd);
}

/* As if temporaries were left. */
int unlinkat(int dirfd, const char *name, int flags)
{
	return LIES("temporaries-are-left") ? 0 : REAL(unlinkat)(dirfd, name, flags);
}

/* As if an existing file were written over in place: readers see it being written. */
int renameat2(int olddir, const char *old, int newdir, const char *name, unsigned int flags)
{
	char bytes[1 << 16];
	int from, to;
	ssize_t n;

	if (!LIES("replaced-in-place"))
		return REAL(renameat2)(olddir, old, newdir, name, flags);
	from = openat(olddir, old, O_RDONLY | O_CLOEXEC);
	to = openat(newdir, name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	n = read(from, bytes, sizeof(bytes));
	(void)!write(to, bytes, (size_t)n / 2);	/* the rest comes later, or never */
	close(from);
	close(to);
	unlinkat(olddir, old, 0);
	return 0;
}
