/* Staging memory: copies in and out with a checksum, and advice to the kernel. */
#include "kvio.h"
#include "crc32c_tables.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define VECTORS __attribute__((target("avx512f,vpclmulqdq")))
#define ROUND ((size_t)256)

static inline VECTORS __m512i fold_over(__m512i v, __m512i by, __m512i add)
{
	return _mm512_ternarylogic_epi64(	/* 0x96: three-way xor */
		_mm512_clmulepi64_epi128(v, by, 0x00),
		_mm512_clmulepi64_epi128(v, by, 0x11), add, 0x96);
}

/*
 * Copy and sum whole rounds in registers: the bytes summed are the bytes stored.
 * Each byte is loaded once: 30 -> 42 GB/s in the cache, 14.5 -> 15.5 from memory to
 * memory (Zen 4; memcpy 48 and 13).  The sum of the four registers is that of 256 bytes.
 */
static VECTORS uint32_t copy_rounds(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t nbytes)
{
	const __m512i by = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_2048));
	__m512i sums[ROUND / 64];
	uint8_t last[ROUND];

	for (size_t i = 0; i < ROUND / 64; i++) {
		sums[i] = _mm512_loadu_si512(src + 64 * i);
		_mm512_storeu_si512(dst + 64 * i, sums[i]);
	}
	sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
	for (size_t at = ROUND; at < nbytes; at += ROUND) {
#pragma GCC unroll 4
		for (size_t i = 0; i < ROUND / 64; i++) {
			__m512i bytes = _mm512_loadu_si512(src + at + 64 * i);

			_mm512_storeu_si512(dst + at + 64 * i, bytes);
			sums[i] = fold_over(sums[i], by, bytes);
		}
	}
	for (size_t i = 0; i < ROUND / 64; i++)
		_mm512_storeu_si512(last + 64 * i, sums[i]);
	return kvio_crc32c(~0u, last, sizeof(last));
}

static uint32_t copy_and_sum(uint32_t crc, uint8_t *dst, const uint8_t *src, size_t nbytes)
{
	size_t whole = kvio_crc32c_implementation() == KVIO_CRC_VPCLMUL ? nbytes & -ROUND : 0;

	if (whole)
		crc = copy_rounds(crc, dst, src, whole);
	return kvio_crc32c_copy(crc, dst + whole, src + whole, nbytes - whole);
}

#else
#define copy_and_sum kvio_crc32c_copy
#endif

uint32_t kvio_copy_one(void *dst, const void *src, size_t nbytes, uint32_t crc, int checksum)
{
	if (checksum)
		return copy_and_sum(crc, dst, src, nbytes);
	if (nbytes)
		memcpy(dst, src, nbytes);
	return crc;
}

/* Copies until the shorter list ends. */
uint32_t kvio_copy_parts(const kvio_part *to, size_t nto, const kvio_part *from, size_t nfrom,
			 uint32_t crc, int checksum)
{
	size_t to_at = 0, from_at = 0;
	kvio_call call = { .handled_ms = 0 };

	while (nto && nfrom && !kvio_cancelled(&call)) {
		uint8_t *dst = (uint8_t *)to->base + to_at;
		const uint8_t *src = (const uint8_t *)from->base + from_at;
		size_t n = (size_t)kvio_min(to->nbytes - to_at, from->nbytes - from_at);

		n = (size_t)kvio_min(n, KVIO_COPIED_AT_ONCE);
		crc = kvio_copy_one(dst, src, n, crc, checksum);
		to_at += n;
		from_at += n;
		if (to_at == to->nbytes) {
			to++, nto--;
			to_at = 0;
		}
		if (nfrom && from_at == from->nbytes) {
			from++, nfrom--;
			from_at = 0;
		}
	}
	return crc;
}

int kvio_advise(void *base, size_t nbytes, int advice)
{
	return madvise(base, nbytes, advice) ? -errno : 0;
}
