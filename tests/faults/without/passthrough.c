/*
 * A FUSE file system that shows a directory of another one, for tests: it has no
 * O_TMPFILE and can be stopped by SIGSTOP, or be slow.
 *
 *   passthrough DIRECTORY CONTROL MOUNTPOINT [FUSE OPTION...]
 *
 * CONTROL is a file of one 32-bit number, mapped: so many milliseconds later is every
 * write and every sync done.  Needs libfuse3 (Debian package libfuse3-dev).
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

static int root;
static volatile const uint32_t *delay_ms;

static void wait_a_while(void)
{
	uint32_t ms = *delay_ms;
	struct timespec t = { (time_t)(ms / 1000), (long)(ms % 1000) * 1000000 };

	if (ms)
		nanosleep(&t, NULL);
}

static const char *below(const char *path)
{
	return path[1] ? path + 1 : ".";
}

static int ended(int r)
{
	return r < 0 ? -errno : 0;
}

static int do_getattr(const char *path, struct stat *st, struct fuse_file_info *fi)
{
	if (fi)
		return ended(fstat((int)fi->fh, st));
	return ended(fstatat(root, below(path), st, AT_SYMLINK_NOFOLLOW));
}

static int do_readlink(const char *path, char *to, size_t nbytes)
{
	ssize_t n = readlinkat(root, below(path), to, nbytes - 1);

	if (n < 0)
		return -errno;
	to[n] = 0;
	return 0;
}

static int do_mkdir(const char *path, mode_t mode)
{
	return ended(mkdirat(root, below(path), mode));
}

static int do_unlink(const char *path)
{
	return ended(unlinkat(root, below(path), 0));
}

static int do_rmdir(const char *path)
{
	return ended(unlinkat(root, below(path), AT_REMOVEDIR));
}

static int do_symlink(const char *to, const char *path)
{
	return ended(symlinkat(to, root, below(path)));
}

static int do_rename(const char *from, const char *to, unsigned int flags)
{
	return ended(renameat2(root, below(from), root, below(to), flags));
}

static int do_link(const char *from, const char *to)
{
	return ended(linkat(root, below(from), root, below(to), 0));
}

static int do_chmod(const char *path, mode_t mode, struct fuse_file_info *fi)
{
	return ended(fi ? fchmod((int)fi->fh, mode) : fchmodat(root, below(path), mode, 0));
}

static int do_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *fi)
{
	(void)fi;
	return ended(fchownat(root, below(path), uid, gid, AT_SYMLINK_NOFOLLOW));
}

static int do_truncate(const char *path, off_t nbytes, struct fuse_file_info *fi)
{
	int fd, r;

	if (fi)
		return ended(ftruncate((int)fi->fh, nbytes));
	fd = openat(root, below(path), O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	r = ended(ftruncate(fd, nbytes));
	close(fd);
	return r;
}

static int do_utimens(const char *path, const struct timespec t[2], struct fuse_file_info *fi)
{
	(void)fi;
	return ended(utimensat(root, below(path), t, AT_SYMLINK_NOFOLLOW));
}

static int open_it(const char *path, int flags, mode_t mode, struct fuse_file_info *fi)
{
	int fd = openat(root, below(path), flags | O_CLOEXEC, mode);

	if (fd < 0)
		return -errno;
	fi->fh = (uint64_t)fd;
	fi->direct_io = (flags & O_DIRECT) != 0;
	return 0;
}

static int do_open(const char *path, struct fuse_file_info *fi)
{
	return open_it(path, fi->flags, 0, fi);
}

static int do_create(const char *path, mode_t mode, struct fuse_file_info *fi)
{
	return open_it(path, fi->flags | O_CREAT, mode, fi);
}

/* Memory of the server's is not aligned: what is direct above is buffered below. */
static int do_read(const char *path, char *to, size_t nbytes, off_t at, struct fuse_file_info *fi)
{
	ssize_t n;

	(void)path;
	if (fi->flags & O_DIRECT)
		(void)!fcntl((int)fi->fh, F_SETFL, 0);
	n = pread((int)fi->fh, to, nbytes, at);
	return n < 0 ? -errno : (int)n;
}

static int do_write(const char *path, const char *from, size_t nbytes, off_t at,
		    struct fuse_file_info *fi)
{
	ssize_t n;

	(void)path;
	wait_a_while();
	if (fi->flags & O_DIRECT)
		(void)!fcntl((int)fi->fh, F_SETFL, 0);
	n = pwrite((int)fi->fh, from, nbytes, at);
	return n < 0 ? -errno : (int)n;
}

static int do_statfs(const char *path, struct statvfs *st)
{
	(void)path;
	return ended(fstatvfs(root, st));
}

static int do_release(const char *path, struct fuse_file_info *fi)
{
	(void)path;
	return ended(close((int)fi->fh));
}

static int do_fsync(const char *path, int data, struct fuse_file_info *fi)
{
	(void)path;
	wait_a_while();
	return ended(data ? fdatasync((int)fi->fh) : fsync((int)fi->fh));
}

static int do_fallocate(const char *path, int mode, off_t at, off_t nbytes,
			struct fuse_file_info *fi)
{
	(void)path;
	return ended(fallocate((int)fi->fh, mode, at, nbytes));
}

static int do_opendir(const char *path, struct fuse_file_info *fi)
{
	return open_it(path, O_RDONLY | O_DIRECTORY, 0, fi);
}

static int do_fsyncdir(const char *path, int data, struct fuse_file_info *fi)
{
	(void)path;
	(void)data;
	wait_a_while();
	return ended(fsync((int)fi->fh));
}

static int do_readdir(const char *path, void *to, fuse_fill_dir_t fill, off_t at,
		      struct fuse_file_info *fi, enum fuse_readdir_flags flags)
{
	int fd = openat((int)fi->fh, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	struct dirent *entry;

	(void)path;
	(void)at;
	(void)flags;
	if (!dir)
		return -errno;
	while ((entry = readdir(dir)))
		if (fill(to, entry->d_name, NULL, 0, 0))
			break;
	closedir(dir);
	return 0;
}

static void *do_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
	(void)connection;
	config->use_ino = 1;
	config->hard_remove = 1;
	config->nullpath_ok = 1;	/* what has fh is not asked for its path */
	config->attr_timeout = config->entry_timeout = config->negative_timeout = 0;
	return NULL;
}

static const struct fuse_operations operations = {
	.init = do_init,
	.getattr = do_getattr,
	.readlink = do_readlink,
	.mkdir = do_mkdir,
	.unlink = do_unlink,
	.rmdir = do_rmdir,
	.symlink = do_symlink,
	.rename = do_rename,
	.link = do_link,
	.chmod = do_chmod,
	.chown = do_chown,
	.truncate = do_truncate,
	.utimens = do_utimens,
	.open = do_open,
	.create = do_create,
	.read = do_read,
	.write = do_write,
	.statfs = do_statfs,
	.release = do_release,
	.fsync = do_fsync,
	.fallocate = do_fallocate,
	.opendir = do_opendir,
	.releasedir = do_release,
	.fsyncdir = do_fsyncdir,
	.readdir = do_readdir,
};

int main(int argc, char **argv)
{
	int control;

	if (argc < 4) {
		fprintf(stderr, "usage: %s DIRECTORY CONTROL MOUNTPOINT [OPTION...]\n", argv[0]);
		return 2;
	}
	/* Stopped, and its parent gone, it would hang whoever comes by for ever. */
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	umask(0);
	root = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	control = open(argv[2], O_RDONLY | O_CLOEXEC);
	delay_ms = mmap(NULL, sizeof(*delay_ms), PROT_READ, MAP_SHARED, control, 0);
	if (root < 0 || control < 0 || delay_ms == MAP_FAILED) {
		perror(argv[1]);
		return 2;
	}
	argv[2] = argv[0];
	return fuse_main(argc - 2, argv + 2, &operations, NULL);
}
