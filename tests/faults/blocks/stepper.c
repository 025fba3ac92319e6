/*
 * Stops a file system just before the n-th call that changes it: a library to
 * preload.  kvio_stop_before(n) arms it, with 0 it is left as it is and disarmed;
 * kvio_stopped() reports whether it came to a stop.  From then on no I/O reaches
 * the disk, and the journal in memory is dropped.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define GOING_DOWN _IOR('X', 125, uint32_t)	/* EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN */
#define NO_LOG_FLUSH 2u

void kvio_stop_before(int calls);
int kvio_stopped(void);

static int left;
static int stopped;

void kvio_stop_before(int calls)
{
	if (calls)
		__atomic_store_n(&stopped, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&left, calls, __ATOMIC_SEQ_CST);
}

int kvio_stopped(void)
{
	return __atomic_load_n(&stopped, __ATOMIC_SEQ_CST);
}

static void step(int fd)
{
	uint32_t how = NO_LOG_FLUSH;

	if (__atomic_load_n(&left, __ATOMIC_SEQ_CST) <= 0 ||
	    __atomic_sub_fetch(&left, 1, __ATOMIC_SEQ_CST))
		return;
	if (!ioctl(fd, GOING_DOWN, &how))
		__atomic_store_n(&stopped, 1, __ATOMIC_SEQ_CST);
}

int fsync(int fd)
{
	step(fd);
	return (int)syscall(SYS_fsync, fd);
}

int fdatasync(int fd)
{
	step(fd);
	return (int)syscall(SYS_fdatasync, fd);
}

int linkat(int olddir, const char *old, int newdir, const char *name, int flags)
{
	step(newdir);
	return (int)syscall(SYS_linkat, olddir, old, newdir, name, flags);
}

int renameat2(int olddir, const char *old, int newdir, const char *name, unsigned int flags)
{
	step(newdir);
	return (int)syscall(SYS_renameat2, olddir, old, newdir, name, flags);
}

int unlinkat(int directory, const char *name, int flags)
{
	step(directory);
	return (int)syscall(SYS_unlinkat, directory, name, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t nbytes)
{
	step(fd);
	return (int)syscall(SYS_fallocate, fd, mode, offset, nbytes);
}

int ftruncate(int fd, off_t nbytes)
{
	step(fd);
	return (int)syscall(SYS_ftruncate, fd, nbytes);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
	step(fd);
	return syscall(SYS_pwritev2, fd, parts, count, offset, 0L, flags);
}
