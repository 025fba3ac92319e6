/*
 * Every system call of kvio, one wrapper each.  A wrapper retries EINTR,
 * returns -errno, and asks kvio_hit() first, so that a test can fail, shorten
 * or turn into a SIGKILL the n-th call of each site.  Outside tests the fault
 * pointer is NULL and the question costs one comparison.
 */
#ifndef KVIO_SYS_H
#define KVIO_SYS_H

#include "kvio.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE 0x00000080	/* Linux 6.14, include/uapi/linux/fs.h */
#endif
#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#define RENAME_EXCHANGE 2
#endif
#ifndef SYS_cachestat
#define SYS_cachestat 451		/* Linux 6.5, the same number on every architecture */
#endif
#ifndef SYS_fchmodat2
#define SYS_fchmodat2 452		/* Linux 6.6 */
#endif

#ifndef FICLONE
#define FICLONE _IOW(0x94, 9, int)	/* include/uapi/linux/fs.h, which clashes with older libcs */
#endif

struct kvio_cachestat_range {
	uint64_t off, len;
};

struct kvio_cachestat {
	uint64_t nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted;
};

static inline int kvio_fault_due(kvio_fault *fault, int site)
{
	int seen = __atomic_add_fetch(&fault->seen[site], 1, __ATOMIC_RELAXED);

	return site == fault->site && seen >= fault->nth && seen < fault->nth + fault->times;
}

/* 0 to go on, or the -errno to return instead of calling the kernel. */
static inline int kvio_hit(kvio_fault *fault, int site)
{
	if (!fault || !kvio_fault_due(fault, site))
		return 0;
	if (fault->error == KVIO_FAULT_KILL)
		kill(getpid(), SIGKILL);
	return -fault->error;
}

/* The same for a transfer of nbytes, which may be cut short instead. */
static inline int kvio_hit_transfer(kvio_fault *fault, int site, size_t *nbytes)
{
	if (!fault || !kvio_fault_due(fault, site))
		return 0;
	if (fault->error == KVIO_FAULT_KILL)
		kill(getpid(), SIGKILL);
	if (fault->error)
		return -fault->error;
	if (fault->transfer == KVIO_TRANSFER_HALF)
		*nbytes /= 2;
	else if (fault->transfer >= 0 && (uint64_t)fault->transfer < *nbytes)
		*nbytes = (size_t)fault->transfer;
	return 0;
}

#define KVIO_CALL(fault, site, expression)					\
	({									\
		int kvio_result;						\
		do {								\
			kvio_result = kvio_hit(fault, site);			\
			if (!kvio_result && (kvio_result = (int)(expression)) < 0) \
				kvio_result = -errno;				\
		} while (kvio_result == -EINTR);				\
		kvio_result;							\
	})

static inline int sys_openat(kvio_fault *fault, int site, int dirfd, const char *path, int flags,
			     mode_t mode)
{
	return KVIO_CALL(fault, site, openat(dirfd, path, flags | O_CLOEXEC, mode));
}

static inline int sys_mkdirat(kvio_fault *fault, int dirfd, const char *path, mode_t mode)
{
	return KVIO_CALL(fault, KVIO_SITE_MKDIR, mkdirat(dirfd, path, mode));
}

static inline int sys_fstat(kvio_fault *fault, int fd, struct stat *st)
{
	return KVIO_CALL(fault, KVIO_SITE_FSTAT, fstat(fd, st));
}

static inline int sys_fstatat(kvio_fault *fault, int dirfd, const char *path, struct stat *st)
{
	return KVIO_CALL(fault, KVIO_SITE_FSTAT, fstatat(dirfd, path, st, AT_SYMLINK_NOFOLLOW));
}

/* Does this user have this access to a directory? */
static inline int sys_access(kvio_fault *fault, int fd, int mode)
{
	return KVIO_CALL(fault, KVIO_SITE_FSTAT, faccessat(fd, ".", mode, AT_EACCESS));
}

static inline int sys_fchmod(kvio_fault *fault, int fd, mode_t mode)
{
	return KVIO_CALL(fault, KVIO_SITE_FCHMOD, fchmod(fd, mode));
}

static inline int sys_fchown_group(kvio_fault *fault, int fd, gid_t group)
{
	return KVIO_CALL(fault, KVIO_SITE_FCHOWN, fchown(fd, (uid_t)-1, group));
}

/* Set the mode of a file that is open with O_PATH, for which fchmod is refused. */
static inline int kvio_chmod_path(int fd, mode_t mode)
{
	char path[32];
	int r = (int)syscall(SYS_fchmodat2, fd, "", mode, AT_EMPTY_PATH);

	if (!r || (errno != ENOSYS && errno != EPERM))
		return r;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return chmod(path, mode);
}

static inline int sys_chmod_path(kvio_fault *fault, int fd, mode_t mode)
{
	return KVIO_CALL(fault, KVIO_SITE_FCHMOD, kvio_chmod_path(fd, mode));
}

static inline int sys_fallocate(kvio_fault *fault, int fd, uint64_t nbytes)
{
	return KVIO_CALL(fault, KVIO_SITE_FALLOCATE, fallocate(fd, 0, 0, (off_t)nbytes));
}

static inline int sys_ftruncate(kvio_fault *fault, int fd, uint64_t nbytes)
{
	return KVIO_CALL(fault, KVIO_SITE_TRUNCATE, ftruncate(fd, (off_t)nbytes));
}

static inline int sys_fdatasync(kvio_fault *fault, int fd)
{
	return KVIO_CALL(fault, KVIO_SITE_FDATASYNC, fdatasync(fd));
}

static inline int sys_start_writeback(kvio_fault *fault, int fd)
{
	return KVIO_CALL(fault, KVIO_SITE_SYNC_RANGE,
			 sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE));
}

/* XFS returns 0 for the fsync of a directory after the file system has shut down, when
 * nothing reaches the disk any more (xfs_dir_fsync, Linux 6.18); fstat returns EIO. */
static inline int sys_fsync_dir(kvio_fault *fault, int fd)
{
	int r = KVIO_CALL(fault, KVIO_SITE_FSYNC_DIR, fsync(fd));
	struct stat st;

	return r < 0 ? r : KVIO_CALL(fault, KVIO_SITE_ALIVE, fstat(fd, &st));
}

static inline int sys_linkat(kvio_fault *fault, int olddir, const char *old, int newdir,
			     const char *name, int flags)
{
	return KVIO_CALL(fault, KVIO_SITE_LINK, linkat(olddir, old, newdir, name, flags));
}

static inline int sys_renameat2(kvio_fault *fault, int olddir, const char *old, int newdir,
				const char *name, unsigned int flags)
{
	return KVIO_CALL(fault, KVIO_SITE_RENAME, renameat2(olddir, old, newdir, name, flags));
}

static inline int sys_unlinkat(kvio_fault *fault, int dirfd, const char *name)
{
	return KVIO_CALL(fault, KVIO_SITE_UNLINK, unlinkat(dirfd, name, 0));
}

static inline int sys_fcntl_setfl(kvio_fault *fault, int fd, int flags)
{
	return KVIO_CALL(fault, KVIO_SITE_FCNTL, fcntl(fd, F_SETFL, flags));
}

/* Does no other open file, or mapping, of this inode write?  A lease for writing is granted
 * only then (fcntl(2), "Leases"); it is given back at once.  -EAGAIN: one does.  A process that
 * opens the file in between breaks the lease, and the signal of that must not be SIGIO, which
 * kills. */
static inline int sys_sole_writer(kvio_fault *fault, int fd)
{
	int r = KVIO_CALL(fault, KVIO_SITE_FCNTL, fcntl(fd, F_SETSIG, SIGURG));

	if (!r)
		r = KVIO_CALL(fault, KVIO_SITE_FCNTL, fcntl(fd, F_SETLEASE, F_WRLCK));
	if (!r)
		r = KVIO_CALL(fault, KVIO_SITE_FCNTL, fcntl(fd, F_SETLEASE, F_UNLCK));
	return r;
}

static inline int sys_dup(kvio_fault *fault, int fd)
{
	return KVIO_CALL(fault, KVIO_SITE_FCNTL, fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

static inline int sys_clone_file(kvio_fault *fault, int to, int from)
{
	return KVIO_CALL(fault, KVIO_SITE_CLONE, ioctl(to, FICLONE, from));
}

static inline int sys_cachestat(kvio_fault *fault, int fd, struct kvio_cachestat_range *range,
				struct kvio_cachestat *out)
{
	return KVIO_CALL(fault, KVIO_SITE_CACHESTAT, syscall(SYS_cachestat, fd, range, out, 0));
}

static inline int sys_getrandom(kvio_fault *fault, void *out, size_t nbytes)
{
	return KVIO_CALL(fault, KVIO_SITE_RANDOM, getrandom(out, nbytes, 0));
}

/* The descriptor is closed whatever close() returns (close(2), "EINTR"), so it is closed
 * even when a test injects an error, and never closed twice. */
static inline int sys_close(kvio_fault *fault, int fd)
{
	int hit = kvio_hit(fault, KVIO_SITE_CLOSE);
	int r = close(fd) ? -errno : 0;

	if (hit)
		r = hit;
	return r == -EINTR ? 0 : r;
}

static inline int64_t sys_transfer(kvio_fault *fault, int site, int fd, struct iovec *iov, int niov,
				   uint64_t offset, int flags)
{
	struct iovec first = iov[0];
	int64_t r;
	int hit;

	do {
		size_t nbytes = first.iov_len;

		hit = kvio_hit_transfer(fault, site, &nbytes);
		if (hit)
			r = hit;
		else if (nbytes != first.iov_len && !nbytes)
			r = 0;
		else {
			int short_call = nbytes != first.iov_len;

			iov[0].iov_len = nbytes;
			r = site == KVIO_SITE_WRITE
				? pwritev2(fd, iov, short_call ? 1 : niov, (off_t)offset, flags)
				: preadv2(fd, iov, short_call ? 1 : niov, (off_t)offset, flags);
			if (r < 0)
				r = -errno;
			iov[0].iov_len = first.iov_len;
		}
	} while (r == -EINTR);
	return r;
}

#endif
