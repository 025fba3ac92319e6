/*
 * One block from Python: a function that takes the key and the buffer as Python has them.
 *
 * cffi converts each argument by itself, and a buffer by way of an object.  For a block of
 * 4 KiB in the page cache that costs as much as its system calls.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000	/* buffers are in the stable ABI since Python 3.11 */
#endif
#include <Python.h>

#include "kvio.h"

#define MAX_KEY 200	/* as kvio.types.MAX_KEY_CHARACTERS */

/* Set by tests (faults.py); calls that begin from now on use it. */
static kvio_fault *current_fault;

void kvio_set_fault(kvio_fault *fault)
{
	__atomic_store_n(&current_fault, fault, __ATOMIC_RELEASE);
}

static PyObject *answer_of(const kvio_op *op)
{
	return Py_BuildValue("(iiIIIIKKKLi)", (int)op->status, (int)op->site,
			     (unsigned)op->crc, (unsigned)op->flags, (unsigned)op->existed,
			     (unsigned)op->mode_taken, (unsigned long long)op->done,
			     (unsigned long long)op->block_nbytes,
			     (unsigned long long)op->file_nbytes, (long long)op->mtime_ns,
			     kvio_lacks_descriptor(op));
}

PyDoc_STRVAR(run_one_doc,
"run_one(one, mode, directory, name, buffer, bounce, bounce_nbytes)\n--\n\n"
"Run one operation; see ``kvio_one``. buffer is one, or None for what has no payload; all but\n"
"it and name are numbers: addresses, or 0 for none. Return the count of bytes of a read that\n"
"succeeded, else the operation's answer and whether it lacked a descriptor.");

static PyObject *run_one(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	const kvio_one *one;
	kvio_dir *directory;
	const char *name;
	Py_ssize_t length;
	Py_buffer view = { 0 };
	void *bounce;
	unsigned long mode;
	size_t bounce_nbytes;
	kvio_op op;

	(void)self;
	if (nargs != 7) {
		PyErr_SetString(PyExc_TypeError, "run_one takes 7 arguments");
		return NULL;
	}
	one = PyLong_AsVoidPtr(args[0]);
	mode = PyLong_AsUnsignedLong(args[1]);
	directory = PyLong_AsVoidPtr(args[2]);
	name = PyUnicode_AsUTF8AndSize(args[3], &length);
	bounce = PyLong_AsVoidPtr(args[5]);
	bounce_nbytes = PyLong_AsSize_t(args[6]);
	if (PyErr_Occurred())
		return NULL;
	if (args[4] != Py_None &&
	    PyObject_GetBuffer(args[4], &view,
			       one->kind == KVIO_READ ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	kvio_run_one(one, __atomic_load_n(&current_fault, __ATOMIC_ACQUIRE), bounce,
		     bounce_nbytes, directory, (uint32_t)mode, name, view.buf, (size_t)view.len,
		     &op);
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&view);	/* nothing, where there is none */
	if (one->kind == KVIO_READ && !op.status)
		return PyLong_FromUnsignedLongLong(op.done);
	return answer_of(&op);
}

/* As kvio.types.check_key: segments of [A-Za-z0-9_][A-Za-z0-9._=@+-]*, joined by slashes. */
static int is_key(const char *name, Py_ssize_t length)
{
	enum { NEVER, LATER, ANYWHERE };
	static const uint8_t kinds[256] = {
		['.'] = LATER, ['='] = LATER, ['@'] = LATER, ['+'] = LATER, ['-'] = LATER,
		['0' ... '9'] = ANYWHERE, ['A' ... 'Z'] = ANYWHERE, ['a' ... 'z'] = ANYWHERE,
		['_'] = ANYWHERE,
	};
	uint8_t least = ANYWHERE;	/* at the beginning of a segment */

	for (Py_ssize_t i = 0; i < length; i++) {
		if (name[i] == '/' && least == LATER) {
			least = ANYWHERE;
			continue;
		}
		if (kinds[(uint8_t)name[i]] < least)
			return 0;
		least = LATER;
	}
	return least == LATER && length <= MAX_KEY;
}

/* The name of a valid key; NULL without an error: it is another object. */
static const char *get_key(PyObject *object)
{
	Py_ssize_t length;
	const char *key = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;

	if (!key)
		PyErr_Clear();		/* it may have lone surrogates */
	return key && is_key(key, length) ? key : NULL;
}

/* View a buffer of native numbers as bytes; 0: it is another object. */
static int get_numbers(PyObject *object, Py_buffer *view, int writable)
{
	static const char kinds[] = "cb?hHiIlLqQnNefdg";	/* as kvio.core.buffers */

	if (!PyObject_CheckBuffer(object))
		return 0;
	if (PyObject_GetBuffer(object, view, writable | PyBUF_ND | PyBUF_FORMAT) < 0) {
		PyErr_Clear();
		return 0;
	}
	if (!view->format || (view->format[0] == 'B' && !view->format[1] && view->itemsize == 1) ||
	    (view->format[0] && !view->format[1] && strchr(kinds, view->format[0])))
		return 1;
	PyBuffer_Release(view);
	return 0;
}

PyDoc_STRVAR(read_fast_doc,
"read_fast(fast, failed, key, buffer)\n--\n\n"
"Read one whole block through the page cache. fast is the address of a ``kvio_fast``. Return\n"
"the count of bytes, or None without having tried: the key is not valid, buffer is not one flat\n"
"writable buffer of numbers or is too long, or the store is closed. Where the read fails return\n"
"failed(answer, key, nbytes), with the answer of run_one.");

static PyObject *read_fast(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	kvio_fast *fast;
	const char *key;
	Py_ssize_t length;
	Py_buffer view;
	PyObject *answer, *result;
	kvio_op op;
	int refused;

	(void)self;
	if (nargs != 4) {
		PyErr_SetString(PyExc_TypeError, "read_fast takes 4 arguments");
		return NULL;
	}
	fast = PyLong_AsVoidPtr(args[0]);
	if (!fast)
		return NULL;
	key = get_key(args[2]);
	if (!key || !get_numbers(args[3], &view, PyBUF_WRITABLE))
		Py_RETURN_NONE;
	/* Counted before the check: who closes does both in the other order. */
	__atomic_fetch_add(&fast->busy, 1, __ATOMIC_SEQ_CST);
	refused = __atomic_load_n(&fast->closed, __ATOMIC_SEQ_CST) ||
		  (uint64_t)view.len >= fast->limit_bytes;
	if (!refused) {
		Py_BEGIN_ALLOW_THREADS
		kvio_run_one(&fast->one, __atomic_load_n(&current_fault, __ATOMIC_ACQUIRE), NULL,
			     0, NULL, KVIO_MODE_BUFFERED, key, view.buf, (size_t)view.len, &op);
		if (!op.status) {
			__atomic_fetch_add(&fast->blocks, 1, __ATOMIC_RELAXED);
			__atomic_fetch_add(&fast->bytes, op.done, __ATOMIC_RELAXED);
		}
		Py_END_ALLOW_THREADS
	}
	__atomic_fetch_sub(&fast->busy, 1, __ATOMIC_SEQ_CST);
	length = view.len;
	PyBuffer_Release(&view);
	if (refused)
		Py_RETURN_NONE;
	if (!op.status && !(op.flags & KVIO_OP_HANDLER))
		return PyLong_FromUnsignedLongLong(op.done);
	answer = answer_of(&op);
	if (!answer)
		return NULL;
	result = PyObject_CallFunction(args[1], "OOn", answer, args[2], length);
	Py_DECREF(answer);
	return result;
}

PyDoc_STRVAR(flat_nbytes_doc,
"flat_nbytes(key, buffer)\n--\n\n"
"Return the length in bytes of one flat buffer of numbers; None: it is something else, or key\n"
"is not valid.");

static PyObject *flat_nbytes(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	Py_ssize_t length;
	Py_buffer view;

	(void)self;
	if (nargs != 2) {
		PyErr_SetString(PyExc_TypeError, "flat_nbytes takes 2 arguments");
		return NULL;
	}
	if (!get_key(args[0]) || !get_numbers(args[1], &view, 0))
		Py_RETURN_NONE;
	length = view.len;
	PyBuffer_Release(&view);
	return PyLong_FromSsize_t(length);
}

PyDoc_STRVAR(copy_small_doc,
"copy_small(memory, offset, buffer, checksum)\n--\n\n"
"Copy a buffer into a larger one, and return its CRC32C, or None where none was asked for. Other\n"
"threads do not run meanwhile: to give way, and to wait for one's turn again, takes longer than\n"
"to copy a small block, and much longer while they are busy.");

static PyObject *copy_small(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	Py_buffer to, from;
	size_t offset;
	uint32_t crc = 0;
	int checksum, fits;

	(void)self;
	if (nargs != 4) {
		PyErr_SetString(PyExc_TypeError, "copy_small takes 4 arguments");
		return NULL;
	}
	offset = PyLong_AsSize_t(args[1]);
	checksum = PyObject_IsTrue(args[3]);
	if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE) < 0)
		return NULL;
	if (PyObject_GetBuffer(args[2], &from, PyBUF_ND) < 0) {
		PyBuffer_Release(&to);
		return NULL;
	}
	fits = offset <= (size_t)to.len && (size_t)from.len <= (size_t)to.len - offset;
	if (fits)
		crc = kvio_copy_one((uint8_t *)to.buf + offset, from.buf, (size_t)from.len, 0,
				    checksum);
	PyBuffer_Release(&from);
	PyBuffer_Release(&to);
	if (!fits) {
		PyErr_SetString(PyExc_ValueError, "a block that does not fit into the memory");
		return NULL;
	}
	if (checksum)
		return PyLong_FromUnsignedLong(crc);
	Py_RETURN_NONE;
}

int kvio_add_functions(void)
{
	static PyMethodDef methods[] = {
		{ "run_one", (PyCFunction)(void (*)(void))run_one, METH_FASTCALL, run_one_doc },
		{ "read_fast", (PyCFunction)(void (*)(void))read_fast, METH_FASTCALL, read_fast_doc },
		{ "flat_nbytes", (PyCFunction)(void (*)(void))flat_nbytes, METH_FASTCALL, flat_nbytes_doc },
		{ "copy_small", (PyCFunction)(void (*)(void))copy_small, METH_FASTCALL, copy_small_doc },
		{ NULL, NULL, 0, NULL },
	};
	PyGILState_STATE state = PyGILState_Ensure();
	PyObject *module = PyImport_AddModule("kvio._native._core");
	int r = module ? PyModule_AddFunctions(module, methods) : -1;

	if (r < 0)
		PyErr_Print();
	PyGILState_Release(state);
	return r;
}
