// SPDX-License-Identifier: Apache-2.0
// What Python sees. Memory is named by its address: whose it is, and that it stays, is Python's to know
// (deepspeed/checkpoint/native_sums.py).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <vector>

#include "copying.h"
#include "crc32.h"

namespace ds {
namespace {

constexpr const char* kCopyingName = "deepspeed.checkpoint.Copying";
using SharedCopying = std::shared_ptr<Copying>;

bool find_level(int number, SumLevel& level) {
    SumLevel found[3];
    if (number < 0 || number >= sum_levels(found)) {
        PyErr_Format(PyExc_ValueError, "there is no level %d", number);
        return false;
    }
    level = found[number];
    return true;
}

PyObject* module_levels(PyObject*, PyObject*) {
    SumLevel found[3];
    const int count = sum_levels(found);
    PyObject* names = PyTuple_New(count);
    for (int k = 0; names != nullptr && k < count; ++k) {
        PyObject* name = PyUnicode_FromString(found[k].name);
        if (name == nullptr) Py_CLEAR(names);
        else PyTuple_SET_ITEM(names, k, name);
    }
    return names;
}

PyObject* module_crc32(PyObject*, PyObject* arguments) {
    unsigned long long source, target, count;
    unsigned long before;
    int number;
    SumLevel level;
    if (!PyArg_ParseTuple(arguments, "KKKki", &source, &target, &count, &before, &number) || !find_level(number, level))
        return nullptr;
    uint32_t sum;
    Py_BEGIN_ALLOW_THREADS
    sum = crc32(level, static_cast<uint32_t>(before), reinterpret_cast<const char*>(source),
                reinterpret_cast<char*>(target), count);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(sum);
}

PyObject* module_combined(PyObject*, PyObject* arguments) {
    unsigned long first, second;
    unsigned long long length;
    if (!PyArg_ParseTuple(arguments, "kkK", &first, &second, &length)) return nullptr;
    return PyLong_FromUnsignedLong(combined(uint32_t(first), uint32_t(second), length));
}

SharedCopying* copying_of(PyObject* capsule) {
    return static_cast<SharedCopying*>(PyCapsule_GetPointer(capsule, kCopyingName));
}

void drop_copying(PyObject* capsule) { delete copying_of(capsule); }

PyObject* module_begin(PyObject*, PyObject* arguments) {
    PyObject* addresses;
    int threads, number;
    SumLevel level;
    if (!PyArg_ParseTuple(arguments, "O!ii", &PyTuple_Type, &addresses, &threads, &number) || !find_level(number, level))
        return nullptr;
    std::vector<Span> spans;
    for (Py_ssize_t k = 0; k + 2 < PyTuple_GET_SIZE(addresses); k += 3) {
        char* target = static_cast<char*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, k)));
        const char* source = static_cast<char*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, k + 1)));
        spans.push_back({target, source, PyLong_AsSize_t(PyTuple_GET_ITEM(addresses, k + 2))});
    }
    if (PyErr_Occurred()) return nullptr;
    auto* copying = new SharedCopying(std::make_shared<Copying>(std::move(spans), level));
    PyObject* capsule = PyCapsule_New(copying, kCopyingName, drop_copying);
    if (capsule == nullptr) {
        delete copying;
        return nullptr;
    }
    Copying::begin(*copying, threads);
    return capsule;
}

PyObject* module_finish(PyObject*, PyObject* arguments) {
    PyObject* capsule;
    int threads;
    if (!PyArg_ParseTuple(arguments, "Oi", &capsule, &threads)) return nullptr;
    const SharedCopying* copying = copying_of(capsule);
    if (copying == nullptr) return nullptr;
    if ((*copying)->made_elsewhere()) {
        PyErr_SetString(PyExc_RuntimeError, "copies for a checkpoint are made by the process that began them, not by a"
                                            " child that was forked meanwhile");
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS
    (*copying)->finish(threads);
    Py_END_ALLOW_THREADS
    const std::vector<uint32_t> sums = (*copying)->sums();
    PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(sums.size()));
    for (size_t k = 0; result != nullptr && k < sums.size(); ++k) {
        PyObject* sum = PyLong_FromUnsignedLong(sums[k]);
        if (sum == nullptr) Py_CLEAR(result);
        else PyTuple_SET_ITEM(result, static_cast<Py_ssize_t>(k), sum);
    }
    return result;
}

PyMethodDef methods[] = {
    {"levels", module_levels, METH_NOARGS, "Ways to compute that this processor has, the fastest first."},
    {"crc32", module_crc32, METH_VARARGS,
     "crc32(source, target, bytes, before, level): CRC-32 at an address, which is copied to `target` unless that is 0."},
    {"combined", module_combined, METH_VARARGS, "combined(first, second, bytes of the second): CRC-32 of both together."},
    {"begin", module_begin, METH_VARARGS,
     "begin((target, source, bytes, ...), threads, level): begin to copy with threads of the lowest priority."},
    {"finish", module_finish, METH_VARARGS,
     "finish(copying, threads): take part with so many threads, wait, and give the CRC-32 of each copy."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "checkpoint_op", "CRC-32, and copies with their CRC-32.", 0, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace ds

#define DS_JOIN_OF(a, b) a##b
#define DS_JOIN(a, b) DS_JOIN_OF(a, b)

PyMODINIT_FUNC DS_JOIN(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&ds::definition); }
