"""Headers of an installed Python, jaxlib, nanobind, CUTLASS and CUDA: nothing is downloaded."""

_PROBE = """
import importlib.util, os, sysconfig
def folder(name):
    spec = importlib.util.find_spec(name)
    return spec.submodule_search_locations[0] if spec else ""
def below(package, subfolder):
    return os.path.join(package, subfolder) if package else ""
print(sysconfig.get_paths()["include"])
print(below(folder("jaxlib"), "include"))
print(folder("nanobind"))
print(below(folder("cutlass_library"), "source/include"))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(name = "python", hdrs = glob(["python/**/*.h"]), includes = ["python"])

cc_library(name = "xla_ffi", hdrs = glob(["xla_ffi/**/*.h"]), includes = ["xla_ffi"])

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"] +
           glob(["nanobind/src/*.h", "nanobind/ext/robin_map/include/**/*.h"]),
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = [
        "-std=c++17",
        "-fvisibility=hidden",
        "-fno-strict-aliasing",
        "-ffunction-sections",
        "-fdata-sections",
        "-w",
        "-Iexternal/python_headers/nanobind/ext/robin_map/include",
        "-Iexternal/python_headers/nanobind/src",
    ],
    defines = ["NB_COMPACT_ASSERTIONS"],
    includes = ["nanobind/include"],
    linkstatic = True,
    textual_hdrs = glob(["nanobind/src/*.cpp"], exclude = ["nanobind/src/nb_combined.cpp"]),
    deps = [":python"],
    alwayslink = True,
)

filegroup(name = "xla_ffi_headers", srcs = glob(["xla_ffi/**/*.h"]))

filegroup(
    name = "cutlass_headers",
    srcs = glob(["cutlass/**/*.h", "cutlass/**/*.hpp", "cutlass/**/*.inl"], allow_empty = True),
)

# For host code; nvcc finds its own headers. Without the C++ library of the toolkit, which is large.
cc_library(
    name = "cuda",
    srcs = glob(["libcudart_static.a"], allow_empty = True),
    hdrs = glob(["cuda/*.h", "cuda/*.hpp", "cuda/crt/*", "cuda/cccl/nv/**"], allow_empty = True),
    includes = ["cuda", "cuda/cccl"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
)
"""

def _python_headers_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or str(ctx.which("python3"))
    probe = ctx.execute([python, "-c", _PROBE])
    if probe.return_code != 0:
        fail("%s failed: %s" % (python, probe.stderr))
    include, jaxlib, nanobind, cutlass = probe.stdout.split("\n")[:4]
    if not jaxlib or not nanobind:
        fail("%s needs jaxlib and nanobind installed" % python)
    ctx.symlink(include, "python")
    ctx.symlink(jaxlib, "xla_ffi")
    ctx.symlink(nanobind, "nanobind")
    cutlass = ctx.os.environ.get("JAX_MEGAMOE_CUTLASS_INCLUDE") or cutlass
    if cutlass:
        ctx.symlink(cutlass, "cutlass")

    home = ctx.os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    nvcc = home + "/bin/nvcc"
    runtime = home + "/lib64/libcudart_static.a"
    if ctx.path(nvcc).exists and ctx.path(runtime).exists:
        ctx.symlink(runtime, "libcudart_static.a")
        ctx.symlink(home + "/include", "cuda")
    else:
        nvcc = ""
    ctx.file("config.bzl", "NVCC = %r\n" % nvcc)
    ctx.file("BUILD", _BUILD)

python_headers = repository_rule(
    implementation = _python_headers_impl,
    environ = ["PYTHON_BIN_PATH", "CUDA_HOME", "JAX_MEGAMOE_CUTLASS_INCLUDE", "PATH"],
    local = True,
)
