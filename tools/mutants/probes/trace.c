/* Linked into the C core of a recording run, which is compiled with
 * -fsanitize-coverage=trace-pc: marks every basic block that is executed, in a
 * map that child processes share and that outlives them. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAP_BYTES (4 << 20)

extern const char __ehdr_start __attribute__((visibility("hidden")));
static unsigned char *map;

__attribute__((constructor)) static void open_map(void)
{
	const char *name = getenv("KVIO_PROBES_C");
	int fd = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
	void *at;

	if (fd < 0)
		return;
	at = mmap(NULL, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (at != MAP_FAILED)
		map = at;
}

void __sanitizer_cov_trace_pc(void)
{
	uintptr_t at = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&__ehdr_start;

	if (map && at < MAP_BYTES)
		map[at] = 1;
}
