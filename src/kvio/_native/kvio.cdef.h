/*
 * The whole interface of the C core.  cffi reads this file and the C sources
 * include it, so a declaration cannot drift from its definition.  Only what
 * cffi can parse may stand here: no #include, no #if.
 */

/* Which system call of kvio a failure came from (kvio_op.site, kvio_fault.site). */
#define KVIO_SITE_NONE 0
#define KVIO_SITE_OPEN_TEMP 1
#define KVIO_SITE_OPEN_READ 2
#define KVIO_SITE_OPEN_DIR 3
#define KVIO_SITE_MKDIR 4
#define KVIO_SITE_FSTAT 5
#define KVIO_SITE_FCHMOD 6
#define KVIO_SITE_FALLOCATE 7
#define KVIO_SITE_WRITE 8
#define KVIO_SITE_READ 9
#define KVIO_SITE_FDATASYNC 10
#define KVIO_SITE_SYNC_RANGE 11
#define KVIO_SITE_LINK 12
#define KVIO_SITE_RENAME 13
#define KVIO_SITE_UNLINK 14
#define KVIO_SITE_FSYNC_DIR 15
#define KVIO_SITE_CLOSE 16
#define KVIO_SITE_CACHESTAT 17
#define KVIO_SITE_FCNTL 18
#define KVIO_SITE_TRUNCATE 19
#define KVIO_SITE_RANDOM 20
#define KVIO_SITE_ALIVE 21
#define KVIO_SITE_FCHOWN 22
#define KVIO_SITE_CLONE 23
#define KVIO_SITES 24

/* kvio_call.group: files and directories keep the group that the system gives them. */
#define KVIO_NO_GROUP 4294967295

/* kvio_fault.error: kill the process instead of failing the call. */
#define KVIO_FAULT_KILL -9
/* kvio_fault.transfer: leave the length alone, or halve it. */
#define KVIO_TRANSFER_ALL -1
#define KVIO_TRANSFER_HALF -2

/* kvio_call.flags; UNJOURNALED: names and inodes reach the disk in any order; READ_ONLY: no
 * directory's mode is repaired. */
#define KVIO_TRAILER 1
#define KVIO_CHECKSUM 2
#define KVIO_DURABLE 4
#define KVIO_UNJOURNALED 8
#define KVIO_READ_ONLY 16

/* kvio_call.if_exists */
#define KVIO_KEEP 0
#define KVIO_REPLACE 1
#define KVIO_ERROR 2

/* kvio_call.publish: how a temporary gets its name, best first. */
#define KVIO_PUBLISH_EMPTY_PATH 0
#define KVIO_PUBLISH_PROC 1
#define KVIO_PUBLISH_NAMED 2

/* kvio_call.verify */
#define KVIO_VERIFY_OFF 0
#define KVIO_VERIFY_LENGTH 1
#define KVIO_VERIFY_FULL 2

/* kvio_op.flags.  RANGE: read a part of a block.  SCRUB: check a block and return no bytes.
 * STREAM: the bytes come piece by piece and cannot be written again; nbytes may be 0 until
 * the last piece.  CLONE: the temporary is read as well as written.  Answers: HAS_CHECKSUM: the trailer has a checksum of the payload.
 * REPLACED: the new name replaced an old one.  UNFIT: the existing block was checked and
 * cannot be kept.  EXISTING: this operation reads an existing block for a write.  HANDLER: the
 * handler of a signal raised an exception meanwhile. */
#define KVIO_OP_RANGE 1
#define KVIO_OP_SCRUB 2
#define KVIO_OP_HAS_CHECKSUM 16
#define KVIO_OP_REPLACED 32
#define KVIO_OP_UNFIT 64
#define KVIO_OP_EXISTING 128
#define KVIO_OP_STREAM 256
#define KVIO_OP_HANDLER 512
#define KVIO_OP_CLONE 1024

/* kvio_op.mode */
#define KVIO_MODE_BUFFERED 0
#define KVIO_MODE_DONTCACHE 1
#define KVIO_MODE_DIRECT 2
#define KVIO_MODE_DIRECT_IF_COLD 3

/* kvio_op.status besides 0 and -errno; kvio_op.site then holds the KVIO_BAD_ reason. */
#define KVIO_CORRUPT -10001
#define KVIO_TOO_SMALL -10002
#define KVIO_BEYOND_END -10003
#define KVIO_WANTS_BOUNCE -10004

#define KVIO_BAD_KIND 1
#define KVIO_BAD_SHORT 2
#define KVIO_BAD_MAGIC 3
#define KVIO_BAD_VERSION 4
#define KVIO_BAD_TRAILER 5
#define KVIO_BAD_LENGTH 6
#define KVIO_BAD_KEY 7
#define KVIO_BAD_PAYLOAD 8

#define KVIO_TRAILER_BYTES 64
#define KVIO_MAX_ALIGN 65536
#define KVIO_TEMP_NAME 96
#define KVIO_NAME_BYTES 256
#define KVIO_HANDLE_BYTES 128
#define KVIO_UNKNOWN 255

#define KVIO_CRC_PORTABLE 0
#define KVIO_CRC_SSE42 1
#define KVIO_CRC_VPCLMUL 2
#define KVIO_CRC_ARMV8 3

/* One contiguous piece of memory of a gather or scatter list. */
typedef struct {
	void *base;
	size_t nbytes;
} kvio_part;

/* Fault injection: calls nth .. nth+times-1 of a site fail or are cut short. */
typedef struct {
	int32_t site;
	int32_t nth;
	int32_t times;
	int32_t error;
	int64_t transfer;
	int32_t seen[KVIO_SITES];
} kvio_fault;

/* A directory that a store keeps open between calls: its descriptor (-1: closed), the
 * number of operations that use it, and whether one did since kvio_dir_was_used.  Changed
 * atomically; the descriptor is closed only while no operation uses it. */
typedef struct {
	int32_t fd;
	int32_t users;
	int32_t recent;
} kvio_dir;

/* The hashed directories of a store: the prefix that is hashed before a key, and the
 * directories by the first byte of the hash. */
typedef struct {
	const uint8_t *prefix;
	size_t prefix_bytes;
	kvio_dir dirs[256];
} kvio_leaf_table;

/* Calls in flight in a store, and blocks transferred so far by mode; changed atomically. */
typedef struct {
	int32_t in_flight;
	uint64_t moved[3];
} kvio_io_counters;

/* Blocks that were lately read with direct I/O, a word each; changed atomically.  A second
 * read within reach_bytes of direct reads goes through the page cache. */
#define KVIO_RECENT_SLOTS 32768
typedef struct {
	uint64_t read_bytes;
	uint64_t reach_bytes;
	uint64_t slots[KVIO_RECENT_SLOTS];
} kvio_recent;

/* The settings that all operations of one call share; recent may be NULL. */
typedef struct {
	uint32_t flags;
	int32_t if_exists;
	int32_t publish;
	int32_t verify;
	uint32_t memory_align;
	uint32_t offset_align;
	size_t chunk_bytes;
	uint8_t *bounce;
	size_t bounce_bytes;
	const char *temp_prefix;
	uint32_t file_mode;		/* permissions of a block */
	uint32_t dir_mode;		/* permissions of a directory that is made */
	uint32_t group;			/* of both; or KVIO_NO_GROUP */
	kvio_recent *recent;
	kvio_fault *fault;
	int32_t cancel;
	int64_t handled_ms;		/* when handlers of signals last ran; 0: not yet */
	int32_t expect_existing;	/* the last key of the call had a block */
	int32_t mode_was_exact;		/* a new file had file_mode without fchmod */
	int32_t spare_files;		/* most files that durable windows of the process open */
} kvio_call;

/* A file whose bytes become a block: its descriptor, its directory and name there, and its
 * length.  moves: the file itself becomes the block, and loses its name; fd is open for reading
 * and writing.  Else fd is open for reading.  sealed: it has got a trailer. */
typedef struct {
	int32_t fd;
	int32_t dirfd;
	const char *name;
	uint64_t nbytes;
	int32_t moves;
	int32_t sealed;
} kvio_source;

/* One block to write, read or look up: the request, then the answer.  A negative dirfd is
 * the -errno of opening the directory.  dir: the kept directory of dirfd; NULL: the caller
 * closes dirfd. */
typedef struct {
	kvio_dir *dir;
	int32_t dirfd;
	uint32_t mode;
	const char *name;
	const kvio_part *parts;
	uint32_t nparts;
	uint64_t nbytes;
	uint64_t offset;
	uint8_t key_hash[16];
	uint32_t flags;

	int32_t status;
	int32_t site;
	int32_t fd;
	uint32_t crc;
	uint32_t existed;
	uint32_t mode_taken;
	uint32_t hot_percent;
	uint64_t done;
	uint64_t block_nbytes;
	uint64_t file_nbytes;
	uint64_t inode;
	int64_t mtime_ns;
	char temp[KVIO_TEMP_NAME];
	kvio_source *source;	/* the file to be renamed, until it is; NULL: the temporary */
} kvio_op;

/* The answers of a directory's file system to a probe. */
typedef struct {
	uint64_t fs_magic;
	uint64_t mount_id;
	uint32_t dio_memory_align;
	uint32_t dio_offset_align;
	int32_t dio_reported;
	int32_t tmpfile;
	int32_t link_empty_path;
	int32_t link_proc;
	int32_t direct;
	int32_t direct_misaligned;
	int32_t dontcache;
	int32_t cachestat;
	int32_t rename_noreplace;
	int32_t fsync_dir;
} kvio_probe_result;

/* Fill an array of operations from columns.  names are separated by zero bytes; counts has
 * the number of bases and lengths of each operation (NULL: one), and sizes the bytes of each
 * (NULL: all); nmodes 1: all have the same mode.  With a leaf table the names are keys: they
 * are hashed, and changed into file names in place; else dirs has the directories, NULL for
 * those that are not kept open. */
void kvio_fill_ops(kvio_op *ops, size_t nops, kvio_leaf_table *leaves, kvio_dir *const *dirs,
		   char *names, const uint32_t *modes, size_t nmodes, const uint32_t *counts,
		   const uint64_t *sizes, kvio_part *parts, size_t nparts,
		   void *const *bases, const size_t *lengths, uint64_t offset, uint32_t flags);

/* The answers of an array of operations, as rows of KVIO_ANSWERS numbers: status, site,
 * crc, flags, existed, mode_taken, done, block_nbytes, file_nbytes, mtime_ns. */
#define KVIO_ANSWERS 10
void kvio_get_answers(const kvio_op *ops, size_t nops, int64_t *answers);
void kvio_get_crcs(const kvio_op *ops, size_t nops, uint32_t *crcs);

/* Kept directories.  kvio_acquire_dirs acquires those of operations, in order, up to the
 * first that is closed, and returns their number; kvio_release_dirs releases them.
 * kvio_dir_acquire returns the descriptor, or -1 if the directory is closed.
 * kvio_dir_evict returns the descriptor, which the caller closes; -1: it is in use.
 * kvio_dir_was_used: was it acquired since the last call of this function? */
size_t kvio_acquire_dirs(kvio_op *ops, size_t nops);
void kvio_release_dirs(const kvio_op *ops, size_t nops);
int kvio_dir_acquire(kvio_dir *dir);
void kvio_dir_release(kvio_dir *dir);
int kvio_dir_evict(kvio_dir *dir);
int kvio_dir_was_used(kvio_dir *dir);

/* Counts of an array of operations: good: without error; stale: in a removed directory;
 * exhausted: kvio_lacks_descriptor; existed: kept an existing block; moved_less: transferred
 * fewer bytes than asked for; mode_taken: of all of them, or -1. */
typedef struct {
	size_t good;
	size_t stale;
	size_t exhausted;
	size_t existed;
	size_t moved_less;
	int32_t mode_taken;
} kvio_summary;
void kvio_sum_up(const kvio_op *ops, size_t nops, kvio_summary *summary);
/* Did an operation fail for want of a descriptor, before it changed anything? */
int kvio_lacks_descriptor(const kvio_op *op);
/* The number of operations from the front without an error. */
size_t kvio_leading(const kvio_op *ops, size_t nops);

/* Around a call: count it as in flight, then count the blocks it transferred. */
void kvio_enter(kvio_io_counters *counters);
void kvio_leave(kvio_io_counters *counters, const kvio_op *ops, size_t nops);

/* Signals.  A call on this thread, which alone runs their handlers, has run() do so every
 * KVIO_HANDLERS_MS, between two system calls; where run() returns 1 the call is cancelled. */
#define KVIO_HANDLERS_MS 100
void kvio_handle_signals(unsigned long thread, int (*run)(void));

/* Blocks.  A batch returns how many operations ended with status 0. */
int kvio_write_batch(kvio_call *call, kvio_op *ops, size_t nops);
/* In a forked child: forget the batches of the parent's threads, which do not exist here. */
void kvio_forget_spare(void);
int kvio_read_batch(kvio_call *call, kvio_op *ops, size_t nops);
int kvio_stat_batch(kvio_call *call, kvio_op *ops, size_t nops);
int kvio_look_batch(kvio_call *call, kvio_op *ops, size_t nops);
int kvio_delete_batch(kvio_call *call, kvio_op *ops, size_t nops);

/* One operation by itself, on one piece of memory or, for KVIO_STAT, none: what such calls of a
 * store share. */
#define KVIO_WRITE 0
#define KVIO_READ 1
#define KVIO_STAT 2
typedef struct {
	kvio_call *call;
	kvio_io_counters *counters;
	kvio_leaf_table *leaves;
	int kind;
} kvio_one;

/* The request as plain arguments: a third of the cost of an array of one.  one->call is copied;
 * op is the answer.  With leaves name is a key and dir unused; -ESTALE: its directory is not
 * open. */
int kvio_run_one(const kvio_one *one, kvio_fault *fault, void *bounce, size_t bounce_bytes,
		 kvio_dir *dir, uint32_t mode, const char *name, void *base, size_t nbytes,
		 kvio_op *op);

/* What read_fast() in python.c shares: blocks shorter than limit_bytes are read through the page
 * cache.  The rest changes atomically: calls in progress, whether new ones are refused, and how
 * many blocks and bytes were read. */
typedef struct {
	kvio_one one;
	uint64_t limit_bytes;
	int32_t busy, closed;
	uint64_t blocks, bytes;
} kvio_fast;

/* Add run_one() and read_fast() to the extension module; -1: that failed, and Python said why. */
int kvio_add_functions(void);
/* The fault of their calls that begin from now on; NULL: none. */
void kvio_set_fault(kvio_fault *fault);

/* One large block by several threads: begin, ranges concurrently, then end. */
int kvio_write_begin(kvio_call *call, kvio_op *op);
int kvio_write_range(kvio_call *call, const kvio_op *op, uint64_t start,
		     uint64_t nbytes, uint32_t *crc);
int kvio_write_end(kvio_call *call, kvio_op *op);
void kvio_write_abort(kvio_call *call, kvio_op *op);
int kvio_read_begin(kvio_call *call, kvio_op *op);
int kvio_read_range(kvio_call *call, const kvio_op *op, uint64_t start,
		    uint64_t nbytes, uint32_t *crc);
int kvio_read_end(kvio_call *call, kvio_op *op);

/* One block from a file, by a rename or a clone.  -EXDEV: neither is possible, and the file is
 * as it was; whatever else fails, the file is as it was or the block has its name. */
int kvio_write_file(kvio_call *call, kvio_op *op, kvio_source *source);

/* Directories.  Paths are relative, of checked components; links are never followed. */
int kvio_open_dir(kvio_call *call, int rootfd, const char *path, int create);
/* The file handle of a directory, which a new directory of the same name does not have;
 * returns its length. */
int kvio_dir_handle(kvio_fault *fault, int fd, uint8_t handle[128]);
int kvio_probe(int dirfd, const char *temp_prefix, kvio_probe_result *result);
/* The same without writing: by a file in the directory, or NULL. */
int kvio_probe_reading(int dirfd, const char *name, kvio_probe_result *result);
int kvio_fs_magic(int fd, uint64_t *magic);
int kvio_cached_pages(int fd, uint64_t offset, uint64_t nbytes, uint64_t *resident,
		      uint64_t *dirty);
int kvio_drop_cache(int fd);
void kvio_forget_read(kvio_recent *recent, uint64_t inode, int64_t mtime_ns);

/* Memory. */
void *kvio_alloc(size_t nbytes, size_t align);
void kvio_free(void *base);
/* Page-aligned memory of blocks: what is freed is kept, KVIO_POOL_BYTES at most or what
 * kvio_pool_keep says, and taken again, on the NUMA node where it was freed.  align: 4096. */
#define KVIO_POOL_BYTES 67108864
void kvio_pool_keep(size_t nbytes);
void *kvio_pool_alloc(size_t nbytes, size_t align);
void kvio_pool_free(void *base);

/* Staging memory.  A copy ends with the shorter list and returns the checksum of the bytes
 * copied; handlers of signals may run after every KVIO_COPIED_AT_ONCE bytes of
 * kvio_copy_parts; advice is that of madvise(2). */
#define KVIO_COPIED_AT_ONCE 67108864
uint32_t kvio_copy_one(void *dst, const void *src, size_t nbytes, uint32_t crc, int checksum);
uint32_t kvio_copy_parts(const kvio_part *to, size_t nto, const kvio_part *from, size_t nfrom,
			 uint32_t crc, int checksum);
int kvio_advise(void *base, size_t nbytes, int advice);

/* NUMA: modes are those of set_mempolicy(2), nodes a bit mask. */
int kvio_set_memory_policy(int mode, const uint64_t *nodes, size_t nwords);
int kvio_get_memory_policy(int *mode, uint64_t nodes[16]);
int kvio_bind_memory(void *base, size_t nbytes, int mode, const uint64_t *nodes, size_t nwords);
int kvio_page_nodes(void *base, size_t npages, size_t page_bytes, int32_t *nodes);

/* A piece of a file with one writer.  Its cells are counted from origin, which is its start
 * or the file block boundary before it; the first and last cell may be shorter.  A cell's
 * checksum is complete once all its bytes are written; then progress is increased. */
typedef struct {
	uint32_t crc;
	uint32_t written;
} kvio_cell;
typedef struct {
	uint64_t start;
	uint64_t end;
	uint64_t origin;
	uint64_t cell_bytes;
	kvio_cell *cells;
	uint32_t *progress;
} kvio_stripe;

/* Files with many writers, step by step; int functions return >= 0 or -errno. */
int kvio_shared_write(kvio_call *call, kvio_op *op, const kvio_stripe *stripe);
int kvio_shared_write_one(const kvio_call *shared, kvio_fault *fault, void *bounce,
			  size_t bounce_bytes, int fd, int direct, void *base, size_t nbytes,
			  uint64_t offset, const kvio_stripe *stripe);
int kvio_shared_count(kvio_cell *cell, uint32_t crc, uint64_t nbytes, uint64_t behind);
int kvio_shared_read(const kvio_call *shared, kvio_fault *fault, void *bounce,
		     size_t bounce_bytes, int fd, int direct, const kvio_part *parts,
		     unsigned int nparts, uint64_t nbytes, uint64_t offset, uint64_t file_nbytes,
		     int checksum, uint32_t *crc);
int kvio_file_create(kvio_fault *fault, int dirfd, const char *name);
int kvio_file_open(kvio_fault *fault, int dirfd, const char *name, int flags);
int kvio_file_allocate(kvio_fault *fault, int fd, uint64_t nbytes, int preallocate);
int kvio_file_truncate(kvio_fault *fault, int fd, uint64_t nbytes);
int kvio_file_sync(kvio_fault *fault, int fd);
int kvio_file_mode(kvio_fault *fault, int fd, unsigned int mode);
int kvio_file_close(kvio_fault *fault, int fd);
int kvio_name_move(kvio_fault *fault, int dirfd, const char *from, const char *to, int replace);
int kvio_name_exchange(kvio_fault *fault, int dirfd, const char *name, const char *other);
int kvio_name_remove(kvio_fault *fault, int dirfd, const char *name);
int kvio_dir_sync(kvio_fault *fault, int dirfd);
void kvio_inode_touch(kvio_fault *fault, int fd);

/* A word of shared memory, followed by the number of processes that wait for a change. */
int kvio_wait_word(uint32_t *word, uint32_t value, uint64_t timeout_ns);
void kvio_bump_word(uint32_t *word);

/* Checksums and hashes. */
void kvio_blake2b_128(const void *head, size_t head_bytes, const void *tail, size_t tail_bytes,
		      uint8_t digest[16]);
uint32_t kvio_crc32c(uint32_t crc, const void *data, size_t nbytes);
uint32_t kvio_crc32c_copy(uint32_t crc, void *dst, const void *src, size_t nbytes);
uint32_t kvio_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b);
uint32_t kvio_crc32c_with(int implementation, uint32_t crc, const void *data, size_t nbytes);
int kvio_crc32c_implementation(void);
int kvio_crc32c_available(int implementation);
