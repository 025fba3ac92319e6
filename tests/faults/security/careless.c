/*
 * A kvio that opens files carelessly: a library to preload.  The environment
 * variable KVIO_CARELESS names how; without it nothing changes.
 *
 *   follows  a file is opened for reading through a link of its name
 *   wide     a file is made for everybody, and made narrow later
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef int open_fn(int, const char *, int, ...);

static int is(const char *how)
{
	const char *said = getenv("KVIO_CARELESS");

	return said && !strcmp(said, how);
}

static int makes(int flags)
{
	return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE;
}

static int carelessly(const char *name, int dirfd, const char *path, int flags, mode_t mode)
{
	open_fn *next = NULL;
	void *found = dlsym(RTLD_NEXT, name);

	memcpy(&next, &found, sizeof(next));
	if (is("follows") && !makes(flags) && !(flags & O_DIRECTORY))
		flags &= ~O_NOFOLLOW;
	if (is("wide") && mode == 0600)
		mode = 0666;
	return next(dirfd, path, flags, mode);
}

#define OPENAT(name)                                                          \
	int name(int dirfd, const char *path, int flags, ...)                 \
	{                                                                     \
		mode_t mode = 0;                                              \
									      \
		if (makes(flags)) {                                           \
			va_list rest;                                         \
			va_start(rest, flags);                                \
			mode = va_arg(rest, mode_t);                          \
			va_end(rest);                                         \
		}                                                             \
		return carelessly(#name, dirfd, path, flags, mode);           \
	}

OPENAT(openat)
OPENAT(openat64)
