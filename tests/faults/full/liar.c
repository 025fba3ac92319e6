/*
 * A libc that lies about a full file system, preloaded into a process: what a store
 * would look like that took no heed of counts or of late errors.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int plays(const char *variant)
{
	const char *asked = getenv("KVIO_LIAR");

	return asked && !strcmp(asked, variant);
}

static int is_full(int r)
{
	return r < 0 && (errno == ENOSPC || errno == EDQUOT || errno == EIO);
}

static size_t bytes_of(const struct iovec *iov, int niov)
{
	size_t sum = 0;

	for (int i = 0; i < niov; i++)
		sum += iov[i].iov_len;
	return sum;
}

ssize_t pwritev2(int fd, const struct iovec *iov, int niov, off_t offset, int flags)
{
	ssize_t (*real)(int, const struct iovec *, int, off_t, int) = dlsym(RTLD_NEXT, "pwritev2");
	ssize_t r = real(fd, iov, niov, offset, flags);

	if (r >= 0 && plays("short_is_whole"))
		return (ssize_t)bytes_of(iov, niov);
	if (is_full((int)r) && plays("full_is_whole"))
		return (ssize_t)bytes_of(iov, niov);
	return r;
}

int fdatasync(int fd)
{
	int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync");
	int r = real(fd);

	return is_full(r) && plays("sync_is_fine") ? 0 : r;
}

int fsync(int fd)
{
	int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
	int r = real(fd);

	return is_full(r) && plays("sync_is_fine") ? 0 : r;
}

int close(int fd)
{
	int (*real)(int) = dlsym(RTLD_NEXT, "close");
	int r = real(fd);

	return is_full(r) && plays("close_is_fine") ? 0 : r;
}
