// SPDX-License-Identifier: Apache-2.0
// The Python module of an op: levels() names the instruction sets, update(...) runs the kernel with threads.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>

#include "levels.h"

namespace ds {
namespace {

// Fewer elements than this for each thread, and waking it costs more than it saves.
constexpr int64_t kElementsPerThread = 1 << 15;
// Parts of threads begin at multiples of it: no two threads write to one cache line, if the tensor begins at one.
constexpr int64_t kGranule = 64;

template <class Update>
void run(const Update& update, int64_t numel, const Level<Update>& level, int threads) {
    const int64_t useful = std::max<int64_t>(1, std::min<int64_t>(threads, numel / kElementsPerThread));
    if (useful == 1) {
        level.walk(update, 0, numel);
        return;
    }
    const int64_t each = (numel / useful + kGranule) / kGranule * kGranule;
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(useful))
    for (int64_t part = 0; part < useful; ++part) {
        const int64_t begin = std::min(part * each, numel);
        level.walk(update, begin, std::min(begin + each, numel));
    }
}

inline PyObject* module_levels(PyObject*, PyObject*) {
    Level<Update> found[3];
    const int count = levels(found);
    PyObject* names = PyTuple_New(count);
    if (names == nullptr) return nullptr;
    for (int k = 0; k < count; ++k) {
        PyObject* name = PyUnicode_FromString(found[k].name);
        if (name == nullptr) {
            Py_DECREF(names);
            return nullptr;
        }
        PyTuple_SET_ITEM(names, k, name);
    }
    return names;
}

// update(tensors, numel, values, level, threads): tensors is a flat tuple of addresses and types, values the numbers of the
// step; what they mean, each op says where it reads them.
inline PyObject* module_update(PyObject*, PyObject* arguments) {
    PyObject *tensors, *values;
    long long numel;
    int level, threads;
    if (!PyArg_ParseTuple(arguments, "O!LO!ii", &PyTuple_Type, &tensors, &numel, &PyTuple_Type, &values, &level, &threads))
        return nullptr;
    constexpr int kOperands = sizeof(Update::operands) / sizeof(Operand);
    if (PyTuple_GET_SIZE(tensors) != 2 * kOperands || PyTuple_GET_SIZE(values) != Update::kValues) {
        PyErr_Format(PyExc_TypeError, "expected %d tensors and %d values", kOperands, int(Update::kValues));
        return nullptr;
    }
    Update update;
    for (int k = 0; k < kOperands; ++k) {
        update.operands[k].data = static_cast<char*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(tensors, 2 * k)));
        update.operands[k].type = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(tensors, 2 * k + 1)));
    }
    double numbers[Update::kValues];
    for (int k = 0; k < Update::kValues; ++k) numbers[k] = PyFloat_AsDouble(PyTuple_GET_ITEM(values, k));
    if (PyErr_Occurred()) return nullptr;
    update.set(numbers);
    Level<Update> found[3];
    if (level < 0 || level >= levels(found)) {
        PyErr_Format(PyExc_ValueError, "there is no level %d", level);
        return nullptr;
    }
    Py_BEGIN_ALLOW_THREADS
    run(update, numel, found[level], threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

inline PyMethodDef module_methods[] = {
    {"levels", module_levels, METH_NOARGS, "Instruction sets that the kernel can use here, the widest first."},
    {"update", module_update, METH_VARARGS, "update(tensors, numel, values, level, threads): one step, in place."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace ds

#define DS_TEXT_OF(name) #name
#define DS_TEXT(name) DS_TEXT_OF(name)
#define DS_JOIN_OF(a, b) a##b
#define DS_JOIN(a, b) DS_JOIN_OF(a, b)

#define DS_MODULE                                                                                                 \
    PyMODINIT_FUNC DS_JOIN(PyInit_, TORCH_EXTENSION_NAME)() {                                                     \
        static PyModuleDef definition = {                                                                         \
            PyModuleDef_HEAD_INIT, DS_TEXT(TORCH_EXTENSION_NAME), nullptr, 0, ds::module_methods, nullptr, nullptr, \
            nullptr, nullptr};                                                                                    \
        return PyModule_Create(&definition);                                                                      \
    }
