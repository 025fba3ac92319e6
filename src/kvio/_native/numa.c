/*
 * NUMA policies of threads and memory ranges, and the nodes of pages.
 * Node sets are bit masks of 64-bit words, as in the kernel's interface.
 */
#include "kvio.h"

#include <sys/syscall.h>
#include <unistd.h>

#define MAX_NODES 1024	/* CONFIG_NODES_SHIFT is 10 at most */
#define PAGES_AT_ONCE 512

/* The kernel reads one bit less than the number it gets. */
static unsigned long bits_of(size_t nwords)
{
	return nwords ? 64ul * nwords + 1 : 0;
}

int kvio_set_memory_policy(int mode, const uint64_t *nodes, size_t nwords)
{
	return syscall(SYS_set_mempolicy, mode, nodes, bits_of(nwords)) ? -errno : 0;
}

/* nodes must have MAX_NODES bits: the kernel refuses a mask shorter than its own. */
int kvio_get_memory_policy(int *mode, uint64_t nodes[16])
{
	return syscall(SYS_get_mempolicy, mode, nodes, (unsigned long)MAX_NODES, NULL, 0ul) ? -errno : 0;
}

/* Set the policy of pages in this range that are touched from now on. */
int kvio_bind_memory(void *base, size_t nbytes, int mode, const uint64_t *nodes, size_t nwords)
{
	return syscall(SYS_mbind, base, nbytes, mode, nodes, bits_of(nwords), 0u) ? -errno : 0;
}

/* The node of each page, or -errno where a page has none yet (-ENOENT). */
int kvio_page_nodes(void *base, size_t npages, size_t page_bytes, int32_t *nodes)
{
	void *pages[PAGES_AT_ONCE];

	for (size_t at = 0; at < npages; at += PAGES_AT_ONCE) {
		size_t n = (size_t)kvio_min(PAGES_AT_ONCE, npages - at);

		for (size_t i = 0; i < n; i++)
			pages[i] = (uint8_t *)base + (at + i) * page_bytes;
		if (syscall(SYS_move_pages, 0, (unsigned long)n, pages, NULL, nodes + at, 0) < 0)
			return -errno;
	}
	return 0;
}
