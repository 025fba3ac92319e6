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
"Write or read one block; see ``kvio_one``. All but name and buffer are numbers: addresses,\n"
"or 0 for none. Return the count of bytes of a read that succeeded, else the operation's\n"
"answer and whether it lacked a descriptor.");

static PyObject *run_one(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	const kvio_one *one;
	kvio_dir *directory;
	const char *name;
	Py_ssize_t length;
	Py_buffer view;
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
	if (PyObject_GetBuffer(args[4], &view, one->reads ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	(one->reads ? kvio_read_one : kvio_write_one)(
		one->call, one->counters, __atomic_load_n(&current_fault, __ATOMIC_ACQUIRE),
		bounce, bounce_nbytes, one->leaves, directory, (uint32_t)mode, name, view.buf,
		(size_t)view.len, &op);
	Py_END_ALLOW_THREADS
	PyBuffer_Release(&view);
	if (one->reads && !op.status)
		return PyLong_FromUnsignedLongLong(op.done);
	return answer_of(&op);
}

int kvio_add_functions(void)
{
	static PyMethodDef methods[] = {
		{ "run_one", (PyCFunction)(void (*)(void))run_one, METH_FASTCALL, run_one_doc },
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
