/*
 * Memory of blocks that was freed, kept for the next block.
 *
 * The pages of new memory are zeroed by the kernel one fault at a time: reading 1 MiB of the
 * page cache into it takes four times as long as into memory that was used before.
 */
#include "kvio.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LEAST_BYTES ((size_t)128 << 10)	/* malloc keeps smaller memory itself */
#define MOST_BYTES ((size_t)32 << 20)
#define MOST_ENTRIES 64

#ifdef __SANITIZE_ADDRESS__
#define IS_POOLED 0	/* so that a use after free is noticed */
#else
#define IS_POOLED 1
#endif

struct entry {
	void *base;
	size_t nbytes;
	unsigned node;	/* of the processor that freed it, and most likely its pages' */
};

/* A child that is forked while the lock is held never gets it, and keeps nothing. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry kept[MOST_ENTRIES];	/* the oldest first */
static size_t entries, kept_bytes, limit_bytes = KVIO_POOL_BYTES;

/* One block may take half of what is kept. */
static size_t most_bytes(void)
{
	size_t half = __atomic_load_n(&limit_bytes, __ATOMIC_RELAXED) / 2;

	return half > MOST_BYTES ? half : MOST_BYTES;
}

static unsigned this_node(void)
{
	unsigned node = 0;

	return syscall(SYS_getcpu, NULL, &node, NULL) ? 0 : node;
}

static struct entry remove_at(size_t i)
{
	struct entry found = kept[i];

	entries--;
	kept_bytes -= found.nbytes;
	memmove(&kept[i], &kept[i + 1], (entries - i) * sizeof(*kept));
	return found;
}

/* The one that was freed last, of this node, and at most a quarter larger: memory on huge pages
 * may begin up to 2 MiB into what malloc mapped for it. */
static void *take(size_t nbytes)
{
	void *base = NULL;
	unsigned node;

	if (nbytes < LEAST_BYTES || nbytes > most_bytes())
		return NULL;
	node = this_node();
	if (pthread_mutex_trylock(&lock))
		return NULL;
	for (size_t i = entries; i-- > 0 && !base;)
		if (kept[i].node == node && kept[i].nbytes >= nbytes &&
		    kept[i].nbytes <= nbytes + nbytes / 4)
			base = remove_at(i).base;
	pthread_mutex_unlock(&lock);
	return base;
}

/* Free what is kept until at most so many bytes and entries are left. */
static void shrink(size_t most_bytes, size_t most_entries)
{
	while (entries && (kept_bytes > most_bytes || entries > most_entries))
		kvio_free(remove_at(0).base);
}

void *kvio_pool_alloc(size_t nbytes, size_t align)
{
	void *base = take(nbytes);

	if (!base)
		base = kvio_alloc(nbytes, align);
	if (!base && !pthread_mutex_trylock(&lock)) {
		shrink(0, 0);
		pthread_mutex_unlock(&lock);
		base = kvio_alloc(nbytes, align);
	}
	return base;
}

void kvio_pool_free(void *base)
{
	size_t nbytes = malloc_usable_size(base), most = most_bytes();
	size_t limit = __atomic_load_n(&limit_bytes, __ATOMIC_RELAXED);

	if (!IS_POOLED || nbytes < LEAST_BYTES || nbytes > most + most / 4 || nbytes > limit ||
	    pthread_mutex_trylock(&lock)) {
		kvio_free(base);
		return;
	}
	shrink(limit - nbytes, MOST_ENTRIES - 1);
	kept[entries++] = (struct entry){ base, nbytes, this_node() };
	kept_bytes += nbytes;
	pthread_mutex_unlock(&lock);
}

void kvio_pool_keep(size_t nbytes)
{
	__atomic_store_n(&limit_bytes, nbytes, __ATOMIC_RELAXED);
	if (pthread_mutex_trylock(&lock))
		return;	/* the next memory that is freed shrinks it */
	shrink(nbytes, MOST_ENTRIES);
	pthread_mutex_unlock(&lock);
}
