// SPDX-License-Identifier: Apache-2.0
// What Python sees: engines, and transfers of theirs. Tensors, paths and errors are Python's (deepspeed/ops/aio).
#include <errno.h>
#include <fcntl.h>
#include <linux/stat.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <system_error>
#include <utility>

#include "engine.h"

namespace py = pybind11;

namespace deepspeed::aio {
namespace {

constexpr double SIGNALS_SEEN_EVERY_S = 0.2;
constexpr unsigned SAFE_ALIGNMENT = 4096;

// Bytes that memory and file offsets of O_DIRECT must be multiples of; (0, 0) where the file has no O_DIRECT.
std::pair<unsigned, unsigned> direct_alignment(int fd)
{
#ifdef STATX_DIOALIGN
    struct statx found {};
    if (syscall(__NR_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN))
        return {found.stx_dio_mem_align, found.stx_dio_offset_align};
#endif
    return {SAFE_ALIGNMENT, SAFE_ALIGNMENT};
}

using SharedEngine = std::shared_ptr<Engine>;

struct Ticket {
    SharedEngine engine;
    std::shared_ptr<Transfer> transfer;
};

SharedEngine make_engine(const std::string& backend, size_t block_size, unsigned queue_depth, bool single_submit,
                         bool overlap_events, unsigned threads)
{
    const EngineSettings settings{backend, block_size, queue_depth, single_submit, overlap_events, threads};
    // In a forked child the engine is left where it is: its threads do not exist there and cannot be joined.
    const auto release = [](Engine* engine) {
        if (!engine->made_elsewhere()) delete engine;
    };
    try {
        return SharedEngine(new Engine(settings), release);
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, (backend + ": " + error.what()).c_str());
        throw py::error_already_set();
    }
}

void refuse_in_child(const Engine& engine)
{
    if (engine.made_elsewhere())
        throw std::runtime_error("a handle of asynchronous I/O does not work in a forked process: make one there");
}

Ticket submit(const SharedEngine& engine, int direct_fd, int buffered_fd, bool writes, uintptr_t address, size_t bytes,
              int64_t offset, size_t direct_begin, size_t direct_end)
{
    refuse_in_child(*engine);
    const Transfer transfer{direct_fd, buffered_fd,  writes,     reinterpret_cast<char*>(address), bytes,
                            offset,    direct_begin, direct_end};
    const py::gil_scoped_release released;
    return {engine, engine->submit(transfer)};
}

void wait(const Ticket& ticket)
{
    refuse_in_child(*ticket.engine);
    for (;;) {
        {
            const py::gil_scoped_release released;
            if (ticket.engine->wait(*ticket.transfer, SIGNALS_SEEN_EVERY_S)) return;
        }
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

void close(Engine& engine)
{
    if (engine.made_elsewhere()) return;
    const py::gil_scoped_release released;
    engine.close();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    module.doc() = "Asynchronous reads and writes of files.";
    module.attr("END_OF_FILE") = END_OF_FILE;
    module.def("available_backends", &available_backends);
    module.def("direct_alignment", &direct_alignment, py::arg("fd"));
    py::class_<Ticket>(module, "Transfer")
        .def("wait", &wait)
        .def_property_readonly("finished", [](const Ticket& t) { return t.engine->look(*t.transfer).finished; })
        .def_property_readonly("done", [](const Ticket& t) { return t.engine->look(*t.transfer).done; })
        .def_property_readonly("error", [](const Ticket& t) { return t.engine->look(*t.transfer).error; })
        .def_property_readonly("error_offset", [](const Ticket& t) { return t.engine->look(*t.transfer).error_offset; });
    py::class_<Engine, SharedEngine>(module, "Engine")
        .def(py::init(&make_engine), py::arg("backend"), py::arg("block_size"), py::arg("queue_depth"),
             py::arg("single_submit"), py::arg("overlap_events"), py::arg("threads"))
        .def("submit", &submit, py::arg("direct_fd"), py::arg("buffered_fd"), py::arg("writes"), py::arg("address"),
             py::arg("bytes"), py::arg("offset"), py::arg("direct_begin"), py::arg("direct_end"))
        .def("close", &close);
}

}  // namespace deepspeed::aio
