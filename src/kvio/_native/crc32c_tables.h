/*
 * The constants of crc32c.c. Each is a power x^n mod P, P = x^32 + 0x1EDC6F41,
 * bit reflected (bit 31 of a word is x^0), computed by repeated squaring.
 * tests/native/crc32c_check.c computes the CRC bit by bit from P alone, so that
 * a wrong constant cannot pass it.
 */
#ifndef KVIO_CRC32C_TABLES_H
#define KVIO_CRC32C_TABLES_H

#define X0 0x80000000u
#define X8 0x00800000u
#define X32 0x82f63b78u			/* P itself */

/* All 256 xors of a subset of eight words; index bit 7 selects the first one. */
#define XORS1(v, w) (v), (v) ^ (w)
#define XORS2(v, w, ...) XORS1(v, __VA_ARGS__), XORS1((v) ^ (w), __VA_ARGS__)
#define XORS3(v, w, ...) XORS2(v, __VA_ARGS__), XORS2((v) ^ (w), __VA_ARGS__)
#define XORS4(v, w, ...) XORS3(v, __VA_ARGS__), XORS3((v) ^ (w), __VA_ARGS__)
#define XORS5(v, w, ...) XORS4(v, __VA_ARGS__), XORS4((v) ^ (w), __VA_ARGS__)
#define XORS6(v, w, ...) XORS5(v, __VA_ARGS__), XORS5((v) ^ (w), __VA_ARGS__)
#define XORS7(v, w, ...) XORS6(v, __VA_ARGS__), XORS6((v) ^ (w), __VA_ARGS__)
#define XORS8(w, ...) { XORS7(0u, __VA_ARGS__), XORS7(w, __VA_ARGS__) }

/*
 * slices[k][byte]: what a byte followed by k zero bytes adds to the register.
 * Bit b of the byte adds x^(32 + 8k + 7 - b); the words are x^32 to x^95.
 */
static const uint32_t slices[8][256] = {
	XORS8(X32, 0x417b1dbcu, 0x20bd8edeu, 0x105ec76fu,
	      0x8ad958cfu, 0xc79a971fu, 0xe13b70f7u, 0xf26b8303u),
	XORS8(0xfbc3faf9u, 0xff17c604u, 0x7f8be302u, 0x3fc5f181u,
	      0x9d14c3b8u, 0x4e8a61dcu, 0x274530eeu, 0x13a29877u),
	XORS8(0x8b277743u, 0xc76580d9u, 0xe144fb14u, 0x70a27d8au,
	      0x38513ec5u, 0x9edea41au, 0x4f6f520du, 0xa541927eu),
	XORS8(0x52a0c93fu, 0xaba65fe7u, 0xd725148bu, 0xe964b13du,
	      0xf64463e6u, 0x7b2231f3u, 0xbf672381u, 0xdd45aab8u),
	XORS8(0x6ea2d55cu, 0x37516aaeu, 0x1ba8b557u, 0x8f2261d3u,
	      0xc5670b91u, 0xe045beb0u, 0x7022df58u, 0x38116facu),
	XORS8(0x1c08b7d6u, 0x0e045bebu, 0x85f4168du, 0xc00c303eu,
	      0x6006181fu, 0xb2f53777u, 0xdb8ca0c3u, 0xef306b19u),
	XORS8(0xf56e0ef4u, 0x7ab7077au, 0x3d5b83bdu, 0x9c5bfaa6u,
	      0x4e2dfd53u, 0xa5e0c5d1u, 0xd0065990u, 0x68032cc8u),
	XORS8(0x34019664u, 0x1a00cb32u, 0x0d006599u, 0x847609b4u,
	      0x423b04dau, 0x211d826du, 0x9278fa4eu, 0x493c7d27u),
};

/*
 * To move a register d bytes on it is multiplied by x^(8d). clmul of reflected
 * words yields x times the product and crc_u64 x^32 more, hence x^(8d - 33).
 */
#define STREAM 1360			/* three are just below 4 KiB */
#define MOVE_STREAM 0x3f70cc6fu
#define MOVE_TWO_STREAMS 0x5aa1f3cfu
#define SHORT 168			/* three are just below 512 */
#define MOVE_SHORT 0x1b3d8f29u
#define MOVE_TWO_SHORTS 0xa60ce07bu
#define ROUNDS 11
#define SIDE (ROUNDS * 32)
#define MOVE_SIDE 0xce7f39f4u

/*
 * Folding by d bits turns a 128-bit lane into a lane congruent to x^d times it.
 * The low half stands x^64 above the high one, clmul yields x times the product,
 * and a 32-bit constant in a 64-bit half stands for x^32 times itself. Listed as
 * for _mm_set_epi64x: x^(d - 33) for the high half, x^(d + 31) for the low half.
 */
#define FOLD_512 0x9e4addf8, 0x740eef02
#define FOLD_1024 0x0d3b6092, 0x6992cea2
#define FOLD_1536 0xab7aff2a, 0xa87ab8a8
#define FOLD_2048 0xb9e02b86, 0xdcb17aa4
#define FOLD_JUMP 0x3771e98f, 0x80ff0093	/* d = 2048 + 8 * 2 * SIDE */

#endif
