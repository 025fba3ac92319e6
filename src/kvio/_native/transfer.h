/* The two loops that transfer bytes; transfer.c. */
#ifndef KVIO_TRANSFER_H
#define KVIO_TRANSFER_H

#include "sys.h"

/* The checksum of a chunk is computed right before the kernel copies it, or right after.
 * 1 MiB was as good as any size on Zen 4 for blocks of 1 to 16 MiB: smaller chunks gain in
 * the second-level cache what they lose in system calls. */
#define KVIO_CHECKSUM_CHUNK ((size_t)1 << 20)

/* A trailer with the largest padding that is read together with a payload. */
#define KVIO_TAIL_BYTES 8192

int kvio_stream_write(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
		      int last, uint32_t *crc);
int kvio_stream_read(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
		     uint8_t *tail, size_t tail_nbytes, int checksum, uint32_t *crc);
int64_t kvio_read_all(kvio_call *call, const kvio_op *op, struct iovec *iov, int niov,
		      uint64_t offset);

#endif
