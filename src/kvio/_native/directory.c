/* Directories, deletion, and what a file system can do. */
#include "sys.h"

#include <limits.h>
#include <linux/stat.h>
#include <stdlib.h>
#include <sys/statfs.h>

#define PROBE_BYTES 4096
#define REMOVE_TRIES 10

/* Does the mode of a directory of this user lack bits of the owner?  A umask can take
 * them from a new one, and a process can be killed before it sets the mode. */
static int lacks_own_bits(const struct stat *st)
{
	return S_ISDIR(st->st_mode) && st->st_uid == geteuid() && (st->st_mode & 0700) != 0700;
}

/* Repair the mode of a directory that cannot be opened, never through a link; 0 where the
 * open should be retried. */
static int repair_closed(kvio_call *call, int parent, const char *name)
{
	int fd = sys_openat(call->fault, KVIO_SITE_OPEN_DIR, parent, name,
			    O_PATH | O_DIRECTORY | O_NOFOLLOW, 0), r;
	struct stat st;

	if (fd < 0)
		return fd;
	r = sys_fstat(call->fault, fd, &st);
	if (!r)
		r = lacks_own_bits(&st) ? sys_chmod_path(call->fault, fd, 0700) : -EACCES;
	sys_close(call->fault, fd);
	return r;
}

/* Mark the inode of a descriptor as changed, so that its next sync writes it.
 *
 * Without a journal ext4 keeps changes of an inode in a buffer of the inode table that
 * fsync and fdatasync do not write, unless the inode is marked as changed: so before Linux
 * 7.0 (1308255bbf84, "ext4: fix fsync(2) for nojournal mode").  A chmod marks it.  If it is
 * refused, as for a directory of another user, the sync alone must do. */
void kvio_inode_touch(kvio_fault *fault, int fd)
{
	struct stat st;

	if (!sys_fstat(fault, fd, &st))
		sys_fchmod(fault, fd, st.st_mode & 07777);
}

static int sync_directory(kvio_call *call, int dirfd)
{
	if (call->flags & KVIO_UNJOURNALED)
		kvio_inode_touch(call->fault, dirfd);
	return sys_fsync_dir(call->fault, dirfd);
}

int kvio_sync_dir(kvio_call *call, kvio_op *op)
{
	int r = sync_directory(call, op->dirfd);

	return r < 0 ? kvio_failed(op, KVIO_SITE_FSYNC_DIR, r) : 0;
}

int kvio_sync_file(kvio_call *call, kvio_op *op)
{
	int r;

	if (call->flags & KVIO_UNJOURNALED)
		kvio_inode_touch(call->fault, op->fd);
	r = sys_fdatasync(call->fault, op->fd);
	return r < 0 ? kvio_failed(op, KVIO_SITE_FDATASYNC, r) : 0;
}

static int open_component(kvio_call *call, int parent, const char *name)
{
	const int flags = O_DIRECTORY | O_NOFOLLOW | O_RDONLY;
	int fd = sys_openat(call->fault, KVIO_SITE_OPEN_DIR, parent, name, flags, 0), r;

	if (fd == -EACCES && !(call->flags & KVIO_READ_ONLY)) {
		r = repair_closed(call, parent, name);	/* -EACCES: nothing to repair */
		fd = r < 0 ? r : sys_openat(call->fault, KVIO_SITE_OPEN_DIR, parent, name, flags, 0);
	}
	return fd;
}

/* Set the group and permissions of a new directory, whatever the umask. */
static int set_dir_mode(kvio_call *call, int fd, const struct stat *st)
{
	int r = 0;

	if (call->group != KVIO_NO_GROUP)
		r = sys_fchown_group(call->fault, fd, call->group);
	else if ((st->st_mode & 07777) == call->dir_mode)
		return 0;
	if (!r)
		r = sys_fchmod(call->fault, fd, call->dir_mode);
	return r;
}

/* Does a directory of this user lack bits of a dir_mode that is meant for others?  Its
 * maker may have been killed before it set the mode. */
static int lacks_shared_bits(const kvio_call *call, const struct stat *st)
{
	return call->dir_mode & 0077 && st->st_uid == geteuid() &&
	       (call->dir_mode & ~st->st_mode & 07777);
}

/* Set the mode of a directory that was just made to dir_mode, and repair an existing one:
 * the owner's bits if this user is refused access (root never is), and all bits of a
 * dir_mode that is meant for others.  A failure matters only to calls that create. */
static int own_dir_mode(kvio_call *call, int fd, int made, int create)
{
	struct stat st;
	int r = sys_fstat(call->fault, fd, &st);

	if (r < 0)
		return r;
	if (made || (create && lacks_shared_bits(call, &st)))
		return set_dir_mode(call, fd, &st);
	if (!lacks_own_bits(&st) || !sys_access(call->fault, fd, R_OK | W_OK | X_OK))
		return 0;
	r = sys_fchmod(call->fault, fd, 0700);
	return create ? r : 0;
}

static int step_into(kvio_call *call, int parent, const char *name, int create)
{
	int fd = open_component(call, parent, name), made = 0, r;

	if (create && fd == -ENOENT) {
		r = sys_mkdirat(call->fault, parent, name, 0700);
		if (r < 0 && r != -EEXIST)
			return r;
		made = !r;
		fd = open_component(call, parent, name);
	}
	if (fd < 0)
		return fd;
	r = call->flags & KVIO_READ_ONLY ? 0 : own_dir_mode(call, fd, made, create);
	/* Another process may have made the directory without syncing its name. */
	if (!r && create && call->flags & KVIO_DURABLE)
		r = sync_directory(call, parent);
	if (r < 0) {
		sys_close(call->fault, fd);
		return r;
	}
	return fd;
}

/* Open path below rootfd, component by component, never through a link; return a
 * descriptor that the caller closes. */
int kvio_open_dir(kvio_call *call, int rootfd, const char *path, int create)
{
	char *copy = strdup(path), *save = NULL, *name;
	int fd = rootfd;

	if (!copy)
		return -ENOMEM;
	for (name = strtok_r(copy, "/", &save); name && fd >= 0; name = strtok_r(NULL, "/", &save)) {
		int next = step_into(call, fd, name, create);

		if (fd != rootfd)
			sys_close(call->fault, fd);
		fd = next;
	}
	free(copy);
	return fd != rootfd ? fd : sys_openat(call->fault, KVIO_SITE_OPEN_DIR, rootfd, ".",
					      O_DIRECTORY | O_RDONLY, 0);
}

/* Was the directory removed while it was open? */
int kvio_dir_is_gone(kvio_call *call, const kvio_op *op)
{
	struct stat st;

	return !sys_fstat(call->fault, op->dirfd, &st) && !st.st_nlink;
}

/* Remove a name.  A full btrfs may have no space even for that until its next commit. */
int kvio_remove(kvio_fault *fault, int dirfd, const char *name)
{
	int r, tries = REMOVE_TRIES;

	while ((r = sys_unlinkat(fault, dirfd, name)) == -ENOSPC && --tries)
		syncfs(dirfd);
	return r;
}

static int unlink_synced(kvio_call *call, kvio_op *op)
{
	int r;

	op->site = KVIO_SITE_UNLINK;
	r = kvio_remove(call->fault, op->dirfd, op->name);
	if (r == -ENOENT && kvio_dir_is_gone(call, op))
		return -ESTALE;
	if (!r && call->flags & KVIO_DURABLE) {
		op->site = KVIO_SITE_FSYNC_DIR;
		r = sync_directory(call, op->dirfd);
	}
	return r;
}

/* Without a journal a power cut may bring the removed name back, so its inode must not be
 * reused before the directory is synced. */
static int delete_one(kvio_call *call, kvio_op *op)
{
	const uint32_t careful = KVIO_DURABLE | KVIO_UNJOURNALED;
	int held = -1, r;

	if (op->dirfd < 0)
		return kvio_no_directory(op, KVIO_SITE_UNLINK);
	if (kvio_cancelled(call))
		return -ECANCELED;
	if ((call->flags & careful) == careful) {
		op->site = KVIO_SITE_OPEN_READ;
		held = sys_openat(call->fault, KVIO_SITE_OPEN_READ, op->dirfd, op->name,
				  O_PATH | O_NOFOLLOW, 0);
		if (held < 0 && held != -ENOENT)
			return held;
	}
	r = unlink_synced(call, op);
	if (held >= 0)
		sys_close(call->fault, held);
	return r;
}

int kvio_delete_batch(kvio_call *call, kvio_op *ops, size_t nops)
{
	int good = 0;

	for (size_t i = 0; i < nops; i++) {
		ops[i].status = delete_one(call, &ops[i]);
		good += !ops[i].status;
	}
	return good;
}

/* Drop the pages of a file from the page cache; dirty pages are written first. */
int kvio_drop_cache(int fd)
{
	if (fdatasync(fd))
		return -errno;
	return -posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
}

/* The number by which statfs(2) identifies file systems. */
int kvio_fs_magic(int fd, uint64_t *magic)
{
	struct statfs fs;

	if (fstatfs(fd, &fs))
		return -errno;
	*magic = (uint64_t)fs.f_type;
	return 0;
}

static void probe_statx(int fd, kvio_probe_result *result)
{
	struct statx stx;

	memset(&stx, 0, sizeof(stx));
	if (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_MNT_ID | STATX_DIOALIGN, &stx))
		return;
	if (stx.stx_mask & STATX_MNT_ID)
		result->mount_id = stx.stx_mnt_id;
	if (stx.stx_mask & STATX_DIOALIGN) {
		result->dio_reported = 1;
		result->dio_memory_align = stx.stx_dio_mem_align;
		result->dio_offset_align = stx.stx_dio_offset_align;
	}
}

/* Try aligned and misaligned direct I/O, by writing a probe file or by reading. */
static void probe_direct(int fd, int reads, kvio_probe_result *result)
{
	uint8_t *buf = kvio_alloc(2 * PROBE_BYTES, PROBE_BYTES);
	ssize_t r;

	result->direct = result->direct_misaligned = -ENOMEM;
	if (!buf)
		return;
	memset(buf, 0, 2 * PROBE_BYTES);
	r = reads ? pread(fd, buf, PROBE_BYTES, 0) : pwrite(fd, buf, PROBE_BYTES, 0);
	result->direct = r == PROBE_BYTES || (reads && r >= 0) ? 0 : -errno;
	r = reads ? pread(fd, buf + 1, PROBE_BYTES - 3, 1) : pwrite(fd, buf + 1, PROBE_BYTES - 3, 1);
	result->direct_misaligned = r < 0 ? -errno : 0;
	kvio_free(buf);
}

static void probe_cache(int fd, int reads, kvio_probe_result *result)
{
	struct iovec iov = { (uint8_t[1]){ 0 }, 1 };
	uint64_t pages, dirty;
	ssize_t r = reads ? preadv2(fd, &iov, 1, 0, RWF_DONTCACHE)
			  : pwritev2(fd, &iov, 1, 0, RWF_DONTCACHE);

	result->dontcache = r < 0 ? -errno : 0;
	result->cachestat = kvio_cached_pages(fd, 0, 1, &pages, &dirty);
}

/* Each form on a new inode: one whose last name was removed cannot be linked again. */
static void probe_links(int dirfd, const char *name, kvio_probe_result *result)
{
	int fd = openat(dirfd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	char path[32];

	result->tmpfile = fd < 0 ? -errno : 0;
	result->link_empty_path = result->link_proc = -EOPNOTSUPP;
	if (fd < 0)
		return;
	result->link_empty_path = linkat(fd, "", dirfd, name, AT_EMPTY_PATH) ? -errno : 0;
	unlinkat(dirfd, name, 0);
	close(fd);
	fd = openat(dirfd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (fd < 0)
		return;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	result->link_proc = linkat(AT_FDCWD, path, dirfd, name, AT_SYMLINK_FOLLOW) ? -errno : 0;
	unlinkat(dirfd, name, 0);
	close(fd);
}

/* Rename to a free name, back, and onto an existing one.  The kernel refuses a name that it
 * has cached without asking the file system, so the renames to free names matter. */
static void probe_rename(int dirfd, const char *name, kvio_probe_result *result)
{
	char other[NAME_MAX + 1];
	size_t last = strlen(name) - 1;
	int fd, r;

	if (last >= NAME_MAX) {
		result->rename_noreplace = -ENAMETOOLONG;
		return;
	}
	memcpy(other, name, last + 2);
	other[last] = name[last] == '0' ? '1' : '0';	/* a sweep removes it as well */
	r = renameat2(dirfd, name, dirfd, other, RENAME_NOREPLACE) ? -errno : 0;
	if (!r)
		r = renameat2(dirfd, other, dirfd, name, RENAME_NOREPLACE) ? -errno : 0;
	fd = r ? r : openat(dirfd, other, O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd >= 0) {
		close(fd);
		r = renameat2(dirfd, other, dirfd, name, RENAME_NOREPLACE) ? -errno : -EOPNOTSUPP;
	}
	result->rename_noreplace = r == -EEXIST ? 0 : r;
	unlinkat(dirfd, other, 0);
}

/* Probe a directory's file system without writing: by a regular file in it, if name is not
 * NULL. */
int kvio_probe_reading(int dirfd, const char *name, kvio_probe_result *result)
{
	const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
	int fd = -1, direct, r;

	memset(result, 0, sizeof(*result));
	r = kvio_fs_magic(dirfd, &result->fs_magic);
	if (r < 0)
		return r;
	result->tmpfile = result->link_empty_path = result->link_proc = -EROFS;
	result->rename_noreplace = result->fsync_dir = -EROFS;
	result->direct = result->direct_misaligned = -ENOENT;
	result->dontcache = result->cachestat = -ENOENT;
	if (!name)
		return 0;
	fd = openat(dirfd, name, flags);
	if (fd < 0)
		return -errno;
	probe_statx(fd, result);
	probe_cache(fd, 1, result);
	direct = openat(dirfd, name, flags | O_DIRECT);
	if (direct >= 0) {
		probe_direct(direct, 1, result);
		close(direct);
	} else {
		result->direct = result->direct_misaligned = -errno;
	}
	close(fd);
	return 0;
}

/* Probe a directory's file system with files that are removed again; answers are 0 for yes,
 * else -errno.  Fails only if no file can be made at all. */
int kvio_probe(int dirfd, const char *name, kvio_probe_result *result)
{
	int fd, direct;

	memset(result, 0, sizeof(*result));
	fd = kvio_fs_magic(dirfd, &result->fs_magic);
	if (fd < 0)
		return fd;
	result->fsync_dir = fsync(dirfd) ? -errno : 0;
	probe_links(dirfd, name, result);
	fd = openat(dirfd, name, O_CREAT | O_EXCL | O_NOFOLLOW | O_RDWR | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	fchmod(fd, 0600);	/* a umask may have taken the owner's bits, and it is opened again */
	probe_cache(fd, 0, result);
	probe_rename(dirfd, name, result);
	direct = openat(dirfd, name, O_RDWR | O_DIRECT | O_NOFOLLOW | O_CLOEXEC);
	result->direct = result->direct_misaligned = direct < 0 ? -errno : 0;
	if (direct >= 0) {
		probe_statx(direct, result);
		probe_direct(direct, 0, result);
		close(direct);
	} else {
		probe_statx(fd, result);
	}
	close(fd);
	return unlinkat(dirfd, name, 0) ? -errno : 0;
}
