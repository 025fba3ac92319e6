/*
 * A disk that keeps a log and fails on request: a FUSE server that shows one
 * image as a file, for a loop device and a real file system above it.
 *
 *   faultdisk IMAGE LOG MOUNTPOINT [FUSE options]
 *
 * Files in the mount point:
 *   disk     the image; each write, flush and discard is logged in order
 *   mark     what is written here is logged as a mark, at once, in order
 *   control  one command a write(2):
 *     "fail ERRNO COUNT TEXT"   the next COUNT writes that contain TEXT (all
 *                               of them without a TEXT; COUNT -1: until healed)
 *                               fail and are not stored
 *     "flush ERRNO"             flushes fail until healed
 *     "heal"                    everything works again
 *
 * The loop driver says of such a file that it has a write-back cache, sends
 * each flush as FUSE_FSYNC and a forced write as a write and a flush: the order
 * of the log, between its flushes, is all that a disk promises.  One thread
 * serves everything, so that the log's order is that of the calls.
 *
 * Log: records {u32 magic, u32 kind, u64 offset, u64 length}, little endian;
 * writes and marks are followed by `length` bytes.
 */
#define FUSE_USE_VERSION 35
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { WRITE = 1, FLUSH, MARK, DISCARD, FAILED_WRITE, FAILED_FLUSH };

#define MAGIC 0x474f4c4bu

struct record {
	uint32_t magic, kind;
	uint64_t offset, length;
};

static int image = -1, record_to = -1;
static off_t image_nbytes;

static int write_error, flush_error;
static long failures_left;
static char failing_text[64];

/* Nothing may be concluded from a log with a gap: end at once. */
static void keep_record(enum kind kind, off_t offset, const char *data, size_t nbytes)
{
	struct record record = { MAGIC, (uint32_t)kind, (uint64_t)offset, nbytes };
	struct iovec parts[2] = { { &record, sizeof(record) }, { (char *)(uintptr_t)data, nbytes } };
	size_t whole = sizeof(record) + (data ? nbytes : 0);

	if (writev(record_to, parts, data ? 2 : 1) != (ssize_t)whole)
		abort();
}

static int disk_getattr(const char *path, struct stat *st, struct fuse_file_info *file)
{
	(void)file;
	memset(st, 0, sizeof(*st));
	st->st_mode = S_IFREG | 0600;
	st->st_nlink = 1;
	if (!strcmp(path, "/")) {
		st->st_mode = S_IFDIR | 0700;
		st->st_nlink = 2;
	} else if (!strcmp(path, "/disk")) {
		st->st_size = image_nbytes;
	} else if (strcmp(path, "/mark") && strcmp(path, "/control")) {
		return -ENOENT;
	}
	return 0;
}

static int disk_open(const char *path, struct fuse_file_info *file)
{
	(void)path;
	file->direct_io = 1;	/* a page cache above would hide faults and merge writes */
	return 0;
}

static int disk_read(const char *path, char *data, size_t nbytes, off_t offset,
		     struct fuse_file_info *file)
{
	ssize_t done;

	(void)file;
	if (strcmp(path, "/disk"))
		return 0;
	done = pread(image, data, nbytes, offset);
	return done < 0 ? -errno : (int)done;
}

static int obey(const char *data, size_t nbytes)
{
	char text[128] = "";
	int error;
	long count;

	if (nbytes >= sizeof(text))
		return -EINVAL;
	memcpy(text, data, nbytes);
	if (!strcmp(text, "heal")) {
		write_error = flush_error = 0;
		return 0;
	}
	if (sscanf(text, "flush %d", &error) == 1) {
		flush_error = error;
		return 0;
	}
	failing_text[0] = 0;
	if (sscanf(text, "fail %d %ld %63s", &error, &count, failing_text) < 2)
		return -EINVAL;
	failures_left = count;
	write_error = error;
	return 0;
}

static int fails(const char *data, size_t nbytes)
{
	size_t length = strlen(failing_text);

	if (!write_error || !failures_left || (length && !memmem(data, nbytes, failing_text, length)))
		return 0;
	if (failures_left > 0)
		failures_left--;
	return write_error;
}

static int disk_write(const char *path, const char *data, size_t nbytes, off_t offset,
		      struct fuse_file_info *file)
{
	int error;

	(void)file;
	if (!strcmp(path, "/mark")) {
		keep_record(MARK, 0, data, nbytes);
		return (int)nbytes;
	}
	if (!strcmp(path, "/control")) {
		error = obey(data, nbytes);
		return error ? error : (int)nbytes;
	}
	error = fails(data, nbytes);
	if (error) {
		keep_record(FAILED_WRITE, offset, NULL, nbytes);
		return -error;
	}
	if (pwrite(image, data, nbytes, offset) != (ssize_t)nbytes)
		abort();
	keep_record(WRITE, offset, data, nbytes);
	return (int)nbytes;
}

static int disk_fsync(const char *path, int data_only, struct fuse_file_info *file)
{
	(void)data_only;
	(void)file;
	if (strcmp(path, "/disk"))
		return 0;
	keep_record(flush_error ? FAILED_FLUSH : FLUSH, 0, NULL, 0);
	return -flush_error;
}

static int disk_fallocate(const char *path, int mode, off_t offset, off_t nbytes,
			  struct fuse_file_info *file)
{
	(void)path;
	(void)file;
	if (fallocate(image, mode, offset, nbytes))
		return -errno;
	keep_record(DISCARD, offset, NULL, (size_t)nbytes);
	return 0;
}

static int disk_truncate(const char *path, off_t nbytes, struct fuse_file_info *file)
{
	(void)nbytes;
	(void)file;
	return strcmp(path, "/disk") ? 0 : -EPERM;
}

/* Mounted: whoever started this waits for the line. */
static void *disk_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
	connection->max_write = 1 << 20;
	config->attr_timeout = 60;
	if (puts("ready") < 0 || fflush(stdout))
		abort();
	return NULL;
}

static const struct fuse_operations operations = {
	.init = disk_init,	   .getattr = disk_getattr,   .open = disk_open,
	.read = disk_read,	   .write = disk_write,	      .fsync = disk_fsync,
	.fallocate = disk_fallocate, .truncate = disk_truncate,
};

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	image = open(argv[1], O_RDWR | O_CLOEXEC);
	record_to = open(argv[2], O_CREAT | O_TRUNC | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
	if (image < 0 || record_to < 0) {
		perror(argv[1]);
		return 1;
	}
	image_nbytes = lseek(image, 0, SEEK_END);
	argv[2] = argv[0];
	return fuse_main(argc - 2, argv + 2, &operations, NULL);
}
