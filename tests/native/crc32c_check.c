/*
 * Checks crc32c.c against the definition, one bit at a time. Exit 0: all right,
 * 1: a difference. An optional argument seeds the random numbers.
 *
 * cc -O2 -I src/kvio/_native tests/native/crc32c_check.c src/kvio/_native/crc32c.c
 */
#include "kvio.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define SHORT_MAX 1100		/* every length at every alignment */
#define LONG_MAX 9000		/* every length at one alignment each: two vector groups */
#define HUGE_BYTES ((size_t)3 << 20)
#define ALIGNMENTS 17
#define GUARD 64

static const struct {
	int id;
	const char *name, *needs;
} implementations[] = {
	{ KVIO_CRC_PORTABLE, "portable", "nothing" },
	{ KVIO_CRC_SSE42, "sse42", "sse4.2 and pclmul" },
	{ KVIO_CRC_VPCLMUL, "vpclmul", "avx512f and vpclmulqdq" },
	{ KVIO_CRC_ARMV8, "armv8", "crc32 and pmull" },
};

static uint64_t random_state = 20240229;

static uint64_t random64(void)		/* splitmix64 */
{
	uint64_t z = random_state += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static size_t below(size_t n)
{
	return (size_t)(random64() % n);
}

/* The definition, from x^32 + 0x1EDC6F41 in its usual bit order. */
static uint32_t by_bits(uint32_t crc, const uint8_t *p, size_t n)
{
	uint32_t poly = 0;

	for (int i = 0; i < 32; i++)
		poly |= (0x1edc6f41u >> i & 1u) << (31 - i);
	for (crc = ~crc; n > 0; n--, p++) {
		crc ^= *p;
		for (int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1u ? poly : 0u);
	}
	return ~crc;
}

static void fail(const char *what, const char *name, size_t nbytes, size_t align,
		 uint32_t got, uint32_t want)
{
	printf("FAILED %s, %s: %zu bytes at alignment %zu: 0x%08x, not 0x%08x\n",
	       what, name, nbytes, align, got, want);
	exit(1);
}

static void compare(const char *what, const char *name, int id, uint32_t start,
		    const uint8_t *p, size_t n, uint32_t want)
{
	uint32_t got = kvio_crc32c_with(id, start, p, n);

	if (got != want)
		fail(what, name, n, (uintptr_t)p & 63, got, want);
}

static void check_vectors(int id, const char *name)
{
	uint8_t bytes[4][32];

	for (int i = 0; i < 32; i++) {
		bytes[0][i] = 0;
		bytes[1][i] = 0xff;
		bytes[2][i] = (uint8_t)i;
		bytes[3][i] = (uint8_t)(31 - i);
	}
	compare("check value", name, id, 0, (const uint8_t *)"123456789", 9, 0xe3069283u);
	compare("RFC 3720 zeros", name, id, 0, bytes[0], 32, 0x8a9136aau);
	compare("RFC 3720 ones", name, id, 0, bytes[1], 32, 0x62a8ab43u);
	compare("RFC 3720 rising", name, id, 0, bytes[2], 32, 0x46dd794eu);
	compare("RFC 3720 falling", name, id, 0, bytes[3], 32, 0x113fdb5cu);
	compare("no bytes", name, id, 0x12345678u, NULL, 0, 0x12345678u);
}

/* Every length from both ends: the last byte lies before a page that faults. */
static void check_lengths(int id, const char *name, const uint8_t *data, const uint8_t *end)
{
	uint32_t start = (uint32_t)random64();

	for (size_t align = 0; align < ALIGNMENTS; align++) {
		uint32_t want = start;

		for (size_t n = 0; n <= SHORT_MAX; n++) {
			compare("lengths", name, id, start, data + align, n, want);
			want = by_bits(want, data + align + n, 1);
		}
	}
	for (size_t n = 0; n <= LONG_MAX; n++) {
		const uint8_t *p = data + n % 64;

		compare("long lengths", name, id, start, p, n, by_bits(start, p, n));
		compare("end of page", name, id, start, end - n, n, by_bits(start, end - n, n));
	}
}

static void check_huge(int id, const char *name, const uint8_t *data)
{
	for (int round = 0; round < 12; round++) {
		size_t align = below(64), n = below(HUGE_BYTES - 64);
		const uint8_t *p = data + align;
		uint32_t start = (uint32_t)random64(), want = by_bits(start, p, n), crc = start;

		compare("huge lengths", name, id, start, p, n, want);
		for (size_t at = 0, step; at < n; at += step) {
			step = below(((size_t)1 << below(20)) + 1);
			step = step < n - at ? step : n - at;
			crc = kvio_crc32c_with(id, crc, p + at, step);
		}
		if (crc != want)
			fail("incremental", name, n, align, crc, want);
	}
}

static void check_one_copy(uint8_t *dst, const uint8_t *src, size_t n)
{
	uint32_t start = (uint32_t)random64(), crc;
	uint8_t guard = (uint8_t)random64();

	memset(dst - GUARD, guard, n + 2 * GUARD);
	crc = kvio_crc32c_copy(start, dst, src, n);
	if (crc != kvio_crc32c_with(KVIO_CRC_PORTABLE, start, src, n))
		fail("copy", "checksum", n, (uintptr_t)src & 63, crc, 0);
	if (memcmp(dst, src, n) != 0)
		fail("copy", "bytes", n, (uintptr_t)src & 63, 1, 0);
	for (size_t i = 0; i < GUARD; i++)
		if (dst[-1 - (ptrdiff_t)i] != guard || dst[n + i] != guard)
			fail("copy", "neighbours", n, (uintptr_t)src & 63, 1, 0);
}

static void check_copy(const uint8_t *data)
{
	uint8_t *room = malloc(HUGE_BYTES + 2 * GUARD + 64);

	if (room == NULL)
		exit(2);
	for (size_t align = 0; align < ALIGNMENTS; align++)
		for (size_t n = 0; n <= SHORT_MAX; n++)
			check_one_copy(room + GUARD + below(64), data + align, n);
	for (int round = 0; round < 30; round++)
		check_one_copy(room + GUARD + below(64), data + below(64),
			       below(HUGE_BYTES - 64));
	if (kvio_crc32c_copy(7, NULL, NULL, 0) != 7)
		fail("copy", "no bytes", 0, 0, 1, 0);
	free(room);
	printf("copy: lengths 0..%d at %d alignments, 30 huge ones, neighbours untouched\n",
	       SHORT_MAX, ALIGNMENTS);
}

/* Appending n zero bytes as a matrix over bits, squared: needs no polynomial arithmetic. */
static uint32_t times(const uint32_t *matrix, uint32_t v)
{
	uint32_t sum = 0;

	for (int i = 0; i < 32; i++)
		sum ^= v >> i & 1u ? matrix[i] : 0u;
	return sum;
}

static uint32_t append_zeros(uint32_t crc, uint64_t n)
{
	uint32_t matrix[32], square[32];
	const uint8_t zero = 0;

	for (int i = 0; i < 32; i++)
		matrix[i] = ~by_bits(~(1u << i), &zero, 1);
	for (crc = ~crc; n > 0; n >>= 1) {
		crc = n & 1u ? times(matrix, crc) : crc;
		for (int i = 0; i < 32; i++)
			square[i] = times(matrix, matrix[i]);
		memcpy(matrix, square, sizeof(matrix));
	}
	return ~crc;
}

static void check_one_combine(uint32_t a, uint64_t n)
{
	uint32_t want = append_zeros(a, n);
	uint32_t got = kvio_crc32c_combine(a, append_zeros(0, n), n);

	if (got != want)
		fail("combine", "zeros", (size_t)n, 0, got, want);
}

static void check_combine(const uint8_t *data)
{
	for (int round = 0; round < 2000; round++) {
		size_t n = below((size_t)1 << below(17)), at = below(n + 1);
		uint32_t start = (uint32_t)random64();
		uint32_t want = by_bits(start, data, n);
		uint32_t got = kvio_crc32c_combine(by_bits(start, data, at),
						   by_bits(0, data + at, n - at), n - at);

		if (got != want)
			fail("combine", "split", n, at, got, want);
	}
	for (int round = 0; round < 2000; round++)
		check_one_combine((uint32_t)random64(), random64() >> below(64));
	for (int bit = 0; bit < 64; bit++)
		check_one_combine((uint32_t)random64(), (uint64_t)1 << bit);
	check_one_combine((uint32_t)random64(), 0);
	check_one_combine((uint32_t)random64(), UINT64_MAX);
	printf("combine: 2000 splits, 2066 lengths from 0 to 2^64 - 1\n");
}

static void check_selection(const uint8_t *data)
{
	int chosen = kvio_crc32c_implementation();
	const int absent[] = { -1, 4, 99 };

	if (!kvio_crc32c_available(chosen) || !kvio_crc32c_available(KVIO_CRC_PORTABLE))
		fail("selection", "chosen", 0, 0, (uint32_t)chosen, 0);
	for (size_t i = 0; i < sizeof(absent) / sizeof(absent[0]); i++)
		if (kvio_crc32c_available(absent[i]))
			fail("selection", "absent", 0, 0, 1, 0);
	for (int id = -1; id <= 4; id++)	/* the unavailable ones fall back */
		compare("selection", "any number", id, 5, data, 5000, by_bits(5, data, 5000));
	for (size_t n = 0; n <= 5000; n++)
		if (kvio_crc32c(5, data, n) != kvio_crc32c_with(KVIO_CRC_PORTABLE, 5, data, n))
			fail("selection", "default", n, 0, 1, 0);
	printf("chosen on this CPU: %s\n", implementations[chosen].name);
}

int main(int argc, char **argv)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);
	const size_t room = HUGE_BYTES + 64 * 1024;	/* a multiple of any page size */
	uint8_t *data = mmap(NULL, room + page, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (argc > 1)
		random_state = strtoull(argv[1], NULL, 0);
	if (data == MAP_FAILED || mprotect(data + room, page, PROT_NONE) != 0)
		return 2;
	for (size_t i = 0; i < room; i++)
		data[i] = (uint8_t)random64();
	for (size_t i = 0; i < sizeof(implementations) / sizeof(implementations[0]); i++) {
		int id = implementations[i].id;
		const char *name = implementations[i].name;

		if (!kvio_crc32c_available(id)) {
			printf("skipped %s: CPU lacks %s\n", name, implementations[i].needs);
			continue;
		}
		check_vectors(id, name);
		check_lengths(id, name, data, data + room);
		check_huge(id, name, data);
		printf("%s: vectors, lengths 0..%d at %d alignments, 0..%d up to the end of "
		       "a page, 12 huge ones whole and split\n",
		       name, SHORT_MAX, ALIGNMENTS, LONG_MAX);
	}
	check_selection(data);
	check_copy(data);
	check_combine(data);
	return 0;
}
