// SPDX-License-Identifier: Apache-2.0
// The Python module of an op: levels() names the instruction sets, update(...) runs the kernel with threads.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <vector>

#include "levels.h"

namespace ds {
namespace {

// Fewer elements than this for each thread, and waking it costs more than it saves.
constexpr int64_t kElementsPerThread = 1 << 15;
// Parts of threads begin at multiples of it: no two threads write to one cache line, if the tensor begins at one.
constexpr int64_t kGranule = 64;

// One tensor of a step, and how many elements those before it have.
template <class Update>
struct Part {
    Update update;
    int64_t numel, before;
};

// Where a thread begins within a tensor, if its share of all tensors begins at `global`.
inline int64_t begin_within(int64_t global, int64_t before, int64_t numel) {
    if (global <= before) return 0;
    return global >= before + numel ? numel : (global - before) / kGranule * kGranule;
}

// Walks over all tensors as if they were one; each thread gets a share of the same size.
template <class Update>
void run(const std::vector<Part<Update>>& parts, const Level<Update>& level, int threads) {
    const int64_t total = parts.empty() ? 0 : parts.back().before + parts.back().numel;
    const int64_t useful = std::max<int64_t>(1, std::min<int64_t>(threads, total / kElementsPerThread));
    const auto share = [&](int64_t thread) {
        const int64_t begin = total / useful * thread, end = thread + 1 == useful ? total : begin + total / useful;
        for (const Part<Update>& part : parts) {
            const int64_t first = begin_within(begin, part.before, part.numel);
            const int64_t past = begin_within(end, part.before, part.numel);
            if (first < past) level.walk(part.update, first, past);
        }
    };
    if (useful == 1) return share(0);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(useful))
    for (int64_t thread = 0; thread < useful; ++thread) share(thread);
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

// Reads the tensors of a step; false with a Python error set.
template <class Update>
bool read_parts(PyObject* tensors, PyObject* numels, const Update& numbers, std::vector<Part<Update>>& parts) {
    constexpr Py_ssize_t kEach = 2 * sizeof(Update::operands) / sizeof(Operand);
    const Py_ssize_t count = PyTuple_GET_SIZE(numels);
    if (PyTuple_GET_SIZE(tensors) != kEach * count) {
        PyErr_Format(PyExc_TypeError, "expected an address and a type of %zd tensors", kEach / 2 * count);
        return false;
    }
    int64_t before = 0;
    for (Py_ssize_t index = 0; index < count; ++index) {
        Part<Update> part{numbers, PyLong_AsLongLong(PyTuple_GET_ITEM(numels, index)), before};
        for (Py_ssize_t k = 0; k < kEach / 2; ++k) {
            const Py_ssize_t at = kEach * index + 2 * k;
            part.update.operands[k].data = static_cast<char*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(tensors, at)));
            part.update.operands[k].type = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(tensors, at + 1)));
        }
        before += part.numel;
        parts.push_back(part);
    }
    return !PyErr_Occurred();
}

// update(tensors, numels, values, level, threads): for each tensor that is stepped, the addresses and types of its
// operands, all in one flat tuple; its number of elements; the numbers of the step, which each op explains where it
// reads them.
inline PyObject* module_update(PyObject*, PyObject* arguments) {
    PyObject *tensors, *numels, *values;
    int number, threads;
    if (!PyArg_ParseTuple(arguments, "O!O!O!ii", &PyTuple_Type, &tensors, &PyTuple_Type, &numels, &PyTuple_Type, &values,
                          &number, &threads))
        return nullptr;
    if (PyTuple_GET_SIZE(values) != Update::kValues)
        return PyErr_Format(PyExc_TypeError, "expected %d values", int(Update::kValues));
    double numbers[Update::kValues];
    for (int k = 0; k < Update::kValues; ++k) numbers[k] = PyFloat_AsDouble(PyTuple_GET_ITEM(values, k));
    Update update{};
    update.set(numbers);
    std::vector<Part<Update>> parts;
    if (!read_parts(tensors, numels, update, parts)) return nullptr;
    Level<Update> found[3];
    if (number < 0 || number >= levels(found)) return PyErr_Format(PyExc_ValueError, "there is no level %d", number);
    Py_BEGIN_ALLOW_THREADS
    run(parts, found[number], threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

inline PyMethodDef module_methods[] = {
    {"levels", module_levels, METH_NOARGS, "Instruction sets that the kernel can use here, the widest first."},
    {"update", module_update, METH_VARARGS, "update(tensors, numels, values, level, threads): one step, in place."},
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
