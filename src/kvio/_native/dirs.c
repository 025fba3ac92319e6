/*
 * Directories that a store keeps open, and closes when descriptors are wanted elsewhere.
 *
 * If a descriptor were closed while a call uses it, its number could be given to another
 * directory in the middle of that call, which would then publish its block there.  So an
 * operation counts itself in before it reads the number, and eviction takes the number
 * away before it reads the count.  All four steps are sequentially consistent: either the
 * operation finds the directory closed, or eviction finds it in use and leaves it open.
 */
#include "sys.h"

int kvio_dir_handle(kvio_fault *fault, int fd, uint8_t handle[KVIO_HANDLE_BYTES])
{
	union {
		struct file_handle handle;
		uint8_t bytes[sizeof(struct file_handle) + KVIO_HANDLE_BYTES];
	} room;
	int mount_id, r;

	room.handle.handle_bytes = KVIO_HANDLE_BYTES;
	r = KVIO_CALL(fault, KVIO_SITE_FSTAT,
		      name_to_handle_at(fd, "", &room.handle, &mount_id, AT_EMPTY_PATH));
	if (r < 0)
		return r;
	memcpy(handle, room.handle.f_handle, room.handle.handle_bytes);
	return (int)room.handle.handle_bytes;
}

int kvio_dir_acquire(kvio_dir *dir)
{
	int fd;

	__atomic_add_fetch(&dir->users, 1, __ATOMIC_SEQ_CST);
	fd = __atomic_load_n(&dir->fd, __ATOMIC_SEQ_CST);
	if (fd < 0)
		kvio_dir_release(dir);
	else
		__atomic_store_n(&dir->recent, 1, __ATOMIC_RELAXED);
	return fd;
}

void kvio_dir_release(kvio_dir *dir)
{
	__atomic_sub_fetch(&dir->users, 1, __ATOMIC_SEQ_CST);
}

/* Only one thread at a time may evict, or put a descriptor in. */
int kvio_dir_evict(kvio_dir *dir)
{
	int fd;

	if (__atomic_load_n(&dir->users, __ATOMIC_RELAXED))
		return -1;
	fd = __atomic_exchange_n(&dir->fd, -1, __ATOMIC_SEQ_CST);
	if (!__atomic_load_n(&dir->users, __ATOMIC_SEQ_CST))
		return fd;
	__atomic_store_n(&dir->fd, fd, __ATOMIC_SEQ_CST);
	return -1;
}

int kvio_dir_was_used(kvio_dir *dir)
{
	return __atomic_exchange_n(&dir->recent, 0, __ATOMIC_RELAXED);
}

size_t kvio_acquire_dirs(kvio_op *ops, size_t nops)
{
	size_t i = 0;

	while (i < nops && ops[i].dir && (ops[i].dirfd = kvio_dir_acquire(ops[i].dir)) >= 0)
		i++;
	return i;
}

void kvio_release_dirs(const kvio_op *ops, size_t nops)
{
	for (size_t i = 0; i < nops; i++)
		if (ops[i].dir)
			kvio_dir_release(ops[i].dir);
}
