/*
 * Broken publish protocols, for the campaign to catch: a library to preload,
 * which forgets, moves or repeats the calls that make a block durable.  The
 * environment variable KVIO_MUTANT names the variant; without it nothing
 * changes.  Acts on what kvio's C core and Python call by name in the C library.
 *
 *   no_directory_sync    a directory's fsync says 0 and does nothing
 *   no_file_sync         a file's does
 *   rename_without_sync  a file's does, if the file has a name already
 *   link_before_sync     both do: the name comes first, and no sync after it
 *   link_then_sync       a file without a name is synced once it has one
 *   retry_failed_sync    a sync that failed is made again, and believed
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum variant {
	FAITHFUL,
	NO_DIRECTORY_SYNC,
	NO_FILE_SYNC,
	RENAME_WITHOUT_SYNC,
	LINK_BEFORE_SYNC,
	LINK_THEN_SYNC,
	RETRY_FAILED_SYNC,
	VARIANTS,
};

static const char *const names[VARIANTS] = {
	[FAITHFUL] = "",
	[NO_DIRECTORY_SYNC] = "no_directory_sync",
	[NO_FILE_SYNC] = "no_file_sync",
	[RENAME_WITHOUT_SYNC] = "rename_without_sync",
	[LINK_BEFORE_SYNC] = "link_before_sync",
	[LINK_THEN_SYNC] = "link_then_sync",
	[RETRY_FAILED_SYNC] = "retry_failed_sync",
};

#define DESCRIPTORS 4096

static enum variant variant;
/* Files whose sync waits for their name. */
static volatile unsigned char owed[DESCRIPTORS];

/* A misspelt variant would be a mutant that nobody can catch. */
__attribute__((constructor)) static void choose(void)
{
	const char *name = getenv("KVIO_MUTANT");

	for (int i = 0; name && i < VARIANTS; i++)
		if (!strcmp(name, names[i])) {
			variant = (enum variant)i;
			return;
		}
	if (name) {
		fprintf(stderr, "KVIO_MUTANT=%s: no such variant\n", name);
		_exit(2);
	}
}

static int is_directory(int fd)
{
	struct stat st;

	return !fstat(fd, &st) && S_ISDIR(st.st_mode);
}

static int has_name(int fd)
{
	struct stat st;

	return !fstat(fd, &st) && st.st_nlink > 0;
}

static int forgets(int fd)
{
	switch (variant) {
	case NO_FILE_SYNC:
	case LINK_BEFORE_SYNC:
		return 1;
	case RENAME_WITHOUT_SYNC:
		return has_name(fd);
	case LINK_THEN_SYNC:
		if (fd >= DESCRIPTORS || has_name(fd))
			return 0;
		owed[fd] = 1;
		return 1;
	default:
		return 0;
	}
}

static int call_sync(long number, int fd)
{
	int r = (int)syscall(number, fd);

	if (r < 0 && variant == RETRY_FAILED_SYNC)
		r = (int)syscall(number, fd);
	return r;
}

int fsync(int fd)
{
	if (is_directory(fd)) {
		if (variant == NO_DIRECTORY_SYNC || variant == LINK_BEFORE_SYNC)
			return 0;
	} else if (forgets(fd)) {
		return 0;
	}
	return call_sync(SYS_fsync, fd);
}

int fdatasync(int fd)
{
	return forgets(fd) ? 0 : call_sync(SYS_fdatasync, fd);
}

/* Only a hint, but one that gets bytes to the disk by luck. */
int sync_file_range(int fd, off_t offset, off_t nbytes, unsigned int flags)
{
	if (variant == NO_FILE_SYNC || variant == LINK_BEFORE_SYNC || variant == LINK_THEN_SYNC ||
	    (variant == RENAME_WITHOUT_SYNC && has_name(fd)))
		return 0;
	return (int)syscall(SYS_sync_file_range, fd, offset, nbytes, flags);
}

/* Which descriptor a link is made of: itself, or through /proc. */
static int linked(int dirfd, const char *path)
{
	int fd = -1;

	if (!*path)
		return dirfd;
	return sscanf(path, "/proc/self/fd/%d", &fd) == 1 ? fd : -1;
}

int linkat(int olddir, const char *old, int newdir, const char *name, int flags)
{
	int r = (int)syscall(SYS_linkat, olddir, old, newdir, name, flags), fd;

	if (r < 0 || variant != LINK_THEN_SYNC)
		return r;
	fd = linked(olddir, old);
	if (fd < 0 || fd >= DESCRIPTORS || !owed[fd])
		return r;
	owed[fd] = 0;
	return (int)syscall(SYS_fdatasync, fd);
}
