/*
 * Broken publish protocols, for the campaign to catch: a library to preload,
 * which forgets, moves or repeats the calls that make a block durable.  The
 * environment variable KVIO_MUTANT names the variant; without it nothing
 * changes.  Acts on what kvio's C core and Python call by name in the C library.
 *
 *   no_directory_sync    a directory's fsync says 0 and does nothing
 *   no_file_sync         a file's does
 *   rename_without_sync  a file's does, if the file has a name already
 *   no_sync              both do
 *   link_before_sync     a file is synced once it has its name, not before
 *   retry_failed_sync    a sync that failed is made again, and believed
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum variant {
	FAITHFUL,
	NO_DIRECTORY_SYNC,
	NO_FILE_SYNC,
	RENAME_WITHOUT_SYNC,
	NO_SYNC,
	LINK_BEFORE_SYNC,
	RETRY_FAILED_SYNC,
	VARIANTS,
};

static const char *const names[VARIANTS] = {
	[FAITHFUL] = "",
	[NO_DIRECTORY_SYNC] = "no_directory_sync",
	[NO_FILE_SYNC] = "no_file_sync",
	[RENAME_WITHOUT_SYNC] = "rename_without_sync",
	[NO_SYNC] = "no_sync",
	[LINK_BEFORE_SYNC] = "link_before_sync",
	[RETRY_FAILED_SYNC] = "retry_failed_sync",
};

#define TEMPORARY ".kvio-tmp-"
/* As long as a thread may well be without a processor. */
#define PREEMPTED_US 2000

static enum variant variant;

/* Of the library that comes next: another one that is preloaded, or the C library. */
static int (*next_fsync)(int);
static int (*next_fdatasync)(int);
static int (*next_sync_file_range)(int, off_t, off_t, unsigned int);
static int (*next_linkat)(int, const char *, int, const char *, int);
static int (*next_renameat)(int, const char *, int, const char *);
static int (*next_renameat2)(int, const char *, int, const char *, unsigned int);

static void find(void *pointer, const char *name)
{
	void *found = dlsym(RTLD_NEXT, name);

	memcpy(pointer, &found, sizeof(found));
}

__attribute__((constructor)) static void find_next(void)
{
	find(&next_fsync, "fsync");
	find(&next_fdatasync, "fdatasync");
	find(&next_sync_file_range, "sync_file_range");
	find(&next_linkat, "linkat");
	find(&next_renameat, "renameat");
	find(&next_renameat2, "renameat2");
}

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

static int is_temporary(const char *path)
{
	const char *slash = strrchr(path, '/');

	return !strncmp(slash ? slash + 1 : path, TEMPORARY, strlen(TEMPORARY));
}

/* Its final name, that is. */
static int waits_for_its_name(int fd)
{
	char self[32], path[PATH_MAX] = "";

	if (!has_name(fd))
		return 1;
	snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	return readlink(self, path, sizeof(path) - 1) > 0 && is_temporary(path);
}

static int forgets(int fd)
{
	switch (variant) {
	case NO_FILE_SYNC:
	case NO_SYNC:
		return 1;
	case RENAME_WITHOUT_SYNC:
		return has_name(fd);
	case LINK_BEFORE_SYNC:
		return waits_for_its_name(fd);
	default:
		return 0;
	}
}

static int call_sync(int (*sync)(int), int fd)
{
	int r = sync(fd);

	if (r < 0 && variant == RETRY_FAILED_SYNC)
		r = sync(fd);
	return r;
}

int fsync(int fd)
{
	if (is_directory(fd)) {
		if (variant == NO_DIRECTORY_SYNC || variant == NO_SYNC)
			return 0;
	} else if (forgets(fd)) {
		return 0;
	}
	return call_sync(next_fsync, fd);
}

int fdatasync(int fd)
{
	return forgets(fd) ? 0 : call_sync(next_fdatasync, fd);
}

/* Only a hint, but one that gets bytes to the disk by luck. */
int sync_file_range(int fd, off_t offset, off_t nbytes, unsigned int flags)
{
	return forgets(fd) ? 0 : next_sync_file_range(fd, offset, nbytes, flags);
}

/* The sync that was left out before the file had its name; with time between the
 * two, or only few runs would show what others' syncs do there. */
static int sync_named(int directory, const char *name)
{
	int fd, r;

	if (variant != LINK_BEFORE_SYNC || is_temporary(name))
		return 0;
	fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	if (fd < 0)
		return 0;	/* gone, or replaced by somebody who syncs it */
	usleep(PREEMPTED_US);
	r = next_fdatasync(fd);
	close(fd);
	return r;
}

int linkat(int olddir, const char *old, int newdir, const char *name, int flags)
{
	int r = next_linkat(olddir, old, newdir, name, flags);

	return r < 0 ? r : sync_named(newdir, name);
}

int renameat(int olddir, const char *old, int newdir, const char *name)
{
	int r = next_renameat(olddir, old, newdir, name);

	return r < 0 ? r : sync_named(newdir, name);
}

int renameat2(int olddir, const char *old, int newdir, const char *name, unsigned int flags)
{
	int r = next_renameat2(olddir, old, newdir, name, flags);

	return r < 0 ? r : sync_named(newdir, name);
}
