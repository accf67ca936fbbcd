"""Every private or version-dependent symbol of Triton that the package uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from threading import Lock, local
from typing import Any, NamedTuple

import torch

__all__ = [
    "INTERPRETED",
    "Address",
    "build_launcher",
    "grid_starter",
    "hash_compiler",
    "intermediate_code",
    "load",
    "start_driver",
    "starter",
    "warm_up",
    "with_base",
]

_LOG = logging.getLogger(__name__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs its kernels in Python; it reads this once, too
_MOST_MAPS = 256  # addresses whose TMA descriptors are kept for each argument
_BASE = 13  # arguments of Triton 3.6's launcher before those of the kernel


class Address(int):
    """A place in the memory of a GPU, for a kernel that takes a tensor there; no tensor is made for it."""

    def data_ptr(self) -> int:
        return self


def hash_compiler() -> None:
    """Let Triton hash its own files, some hundred megabytes, for the keys of its cache.

    It keeps the hash. Threads that compile for the first time together would each compute it.
    """
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # the first compilation hashes them then
        return
    triton_key()


def start_driver() -> None:
    """Let Triton build the module by which it calls CUDA, for which it needs a C compiler if its cache has none."""
    from triton.runtime.driver import driver

    driver.active.get_current_device()


class Made(NamedTuple):
    """Triton's intermediate code of a kernel, and what it was made from."""

    module: Any
    context: Any  # to which the module belongs
    source: Any
    target: Any
    options: Any

    def fits(self, source: Any, target: Any, options: Any) -> bool:
        """Whether Triton would make the same code of this."""
        ours = self.source
        return bool(
            (ours.fn, ours.signature, ours.constants, ours.attrs)
            == (source.fn, source.signature, source.constants, source.attrs)
            and (self.target, vars(self.options)) == (target, vars(options))
        )


class _Told(local):
    """Whom this thread tells when Triton's front end is done with a kernel, and the code that was made before."""

    then: Callable[[], None] | None = None
    made: Made | None = None


_TOLD = _Told()
_LOOKING = Lock()


def intermediate_code(
    kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], device: torch.device
) -> Made | None:
    """Let Triton's front end make the code of a kernel, without driver and cache; None where it cannot."""
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(kernel, "device_caches"):
        return None
    major, minor = torch.cuda.get_device_capability(device)
    try:
        return _made(kernel, {**arguments, **options}, 10 * major + minor)
    except Exception:  # noqa: BLE001  private functions of Triton, which may change; `warm_up` does without
        _LOG.debug("no intermediate code was made ahead", exc_info=True)
        return None


def _made(kernel: Any, given: dict[str, Any], capability: int) -> Made:
    """What `JITFunction.run` and `triton.compile` do up to the first module."""
    from triton import knobs
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    given |= {
        "debug": kernel.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    bound, specialized, chosen = create_function_from_signature(kernel.signature, kernel.params, backend)(**given)
    chosen, *described = kernel._pack_args(backend, given, bound, specialized, chosen)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        Source = ASTSource
    source = Source(kernel, *described)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, chosen, backend.get_codegen_implementation(chosen), backend.get_module_map(), context
    )
    return Made(module, context, source, target, chosen)


def warm_up(
    kernel: Any,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    then: Callable[[], None],
    made: Made | None = None,
) -> Any:
    """Compile a kernel that Triton's cache does not have, and call `then` as soon as its front end is done.

    The front end holds the interpreter's lock. `made` is what it made before: `intermediate_code`.
    """
    if hasattr(kernel, "device_caches"):
        _cache_of(kernel)
        if not hasattr(kernel.compile, "tells"):
            kernel.compile = _telling(kernel.compile)
    _TOLD.then, _TOLD.made = then, made
    try:
        return kernel.warmup(**arguments, grid=(1,), **options)
    finally:
        _TOLD.then = _TOLD.made = None


def _cache_of(kernel: Any) -> Any:
    """What Triton keeps of a kernel on the current device; one thread at a time, as the first sets `kernel.compile`."""
    from triton.runtime.driver import driver

    with _LOOKING:
        return kernel.device_caches[driver.active.get_current_device()]


def _telling(compile: Callable[..., Any]) -> Callable[..., Any]:
    """`compile` of a kernel, which tells when the intermediate code of its source is there."""

    def telling(src: Any, *args: Any, **named: Any) -> Any:
        then, made, make_ir = _TOLD.then, _TOLD.made, getattr(src, "make_ir", None)
        if then is None or make_ir is None:
            return compile(src, *args, **named)

        def told(target: Any, options: Any, *given: Any, **more: Any) -> Any:
            if made is not None and made.fits(src, target, options):
                module = made.module
            else:
                module = make_ir(target, options, *given, **more)
            then()
            return module

        src.make_ir = told
        try:
            return compile(src, *args, **named)
        finally:
            vars(src).pop("make_ir", None)  # which would hold on to the source

    telling.tells = True  # type: ignore[attr-defined]
    return telling


def load(compiled: Any) -> Any:
    """Build a kernel's launcher, for which Triton 3.6 calls a C compiler, and load its code onto the current device."""
    return (compiled.result() if hasattr(compiled, "result") else compiled).run


def build_launcher(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Build the launcher of a kernel that is not compiled yet into Triton's cache, where `load` finds it.

    Returns whether there is one: Triton 3.6 lets a C compiler build it, after the kernel. It depends on nothing but the
    types of the arguments.
    """
    from triton.backends.nvidia import driver

    if getattr(driver, "_BASE_ARGS_FORMAT_LEN", None) != _BASE:
        return False
    *_, bind = _cache_of(kernel)
    _, specialized, _ = bind(**arguments, **options, debug=False, instrumentation_mode="")
    signature = {name: kind for name, (kind, _) in zip(kernel.arg_names, specialized, strict=True)}
    described = [True for kind in signature.values() if isinstance(kind, str) and kind.startswith("tensordesc")]
    driver.compile_module_from_src(
        src=driver.make_launcher({}, signature, described),
        name="__triton_launcher",
        library_dirs=driver.library_dirs(),
        include_dirs=driver.include_dirs,
        libraries=driver.libraries,
    )
    return True


def with_base(descriptor: Any, x: Any) -> Any:
    """The same TMA descriptor for another tensor, which is not checked again."""
    twin = object.__new__(type(descriptor))
    twin.__dict__.update(descriptor.__dict__, base=x)
    return twin


class Starter(NamedTuple):
    """Two ways to start a compiled kernel again, with other values of its changing arguments."""

    by_name: Callable[..., None]
    bound: Callable[..., Callable[..., None]]  # from names to a function of values in this order


def starter(compiled: Any, programs: int, arguments: Mapping[str, Any], changing: Any) -> Starter:
    """Functions that start a compiled kernel on the current stream, with other values of the changing arguments.

    `arguments` are all arguments in order, of which nothing in `changing` is kept; what is None there stays None. The
    function is the kernel's own launcher; `kernel[grid]` inspects each argument first, and tells profilers about it.
    Tensors may be given as an `Address`, and in order also as a number.
    """
    from triton import knobs
    from triton.runtime import driver

    hooks = knobs.runtime
    by_grid, run = compiled[programs, 1, 1], compiled.run
    function, metadata = compiled.function, compiled.packed_metadata
    device, stream = driver.active.get_current_device(), driver.active.get_current_stream
    places = {name: at for at, (name, x) in enumerate(arguments.items()) if name in changing and _holds_tensors(x)}
    described = {name: with_base(x, None) for name, x in arguments.items() if hasattr(x, "block_shape")}
    template = [None if name in places else x for name, x in arguments.items()]
    direct = _direct(compiled, arguments, places, described)

    def by_name(**given: Any) -> None:
        values = template.copy()
        for name, at in places.items():
            x = given[name]
            values[at] = with_base(described[name], x) if name in described else x
        if _set(hooks.launch_enter_hook) or _set(hooks.launch_exit_hook):
            by_grid(*values)
        else:
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *values)

    def bound(*names: str) -> Callable[..., None]:
        if missing := places.keys() - set(names):
            raise RuntimeError(f"a launch needs {', '.join(sorted(missing))}")

        def named(*given: Any) -> None:
            by_name(**{name: Address(x) if type(x) is int else x for name, x in zip(names, given, strict=True)})

        if direct is None:
            return named
        start = direct.bound(programs, names)

        def quickly(*given: Any) -> None:
            enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
            if (enter is None or not getattr(enter, "calls", True)) and (
                leave is None or not getattr(leave, "calls", True)
            ):
                start(stream(device), given)
            else:  # somebody listens
                named(*given)

        return quickly

    if direct is None:
        return Starter(by_name, bound)
    again = bound(*places)
    return Starter(lambda **given: again(*[given[name] for name in places]), bound)


def grid_starter(compiled: Any) -> Callable[[int, Sequence[Any]], None]:
    """A function that starts a compiled kernel on so many programs, on the current stream, with all of its arguments.

    Triton's own makes another function for each launch, and asks who listens to it.
    """
    from triton import knobs
    from triton.runtime import driver

    hooks, run, function, metadata = knobs.runtime, compiled.run, compiled.function, compiled.packed_metadata
    device, stream = driver.active.get_current_device(), driver.active.get_current_stream

    def start(programs: int, values: Sequence[Any]) -> None:
        if _set(hooks.launch_enter_hook) or _set(hooks.launch_exit_hook):
            compiled[programs, 1, 1](*values)
        else:
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *values)

    return start


def _holds_tensors(x: Any) -> bool:
    return any(map(_holds_tensors, x)) if isinstance(x, tuple) else hasattr(x, "data_ptr") or hasattr(x, "block_shape")


def _set(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


class _Direct(NamedTuple):
    """The C launcher of Triton 3.6 without its Python around it: its fixed arguments, and where the others go."""

    raw: Callable[..., None]
    begin: tuple[Any, ...]  # what the launcher takes after the grid and the stream
    flat: list[Any]  # the arguments of the kernel
    slots: list[tuple[str, int]]  # of tuples
    pointers: list[tuple[str, int]]  # of tensors: the launcher asks the driver about an address that is no number
    mapped: list[tuple[str, int, Any, Any, dict[int, Any]]]  # descriptors, what Triton knows of them, and by address

    def bound(self, programs: int, names: Sequence[str]) -> Callable[[int, Sequence[Any]], None]:
        """A function that starts the kernel on a stream, with values in the order of these names."""
        from triton.backends.nvidia import driver

        raw, begin, flat = self.raw, self.begin, self.flat
        order = {name: i for i, name in enumerate(names)}
        slots, pointers = ([(order[name], at) for name, at in some] for some in (self.slots, self.pointers))
        mapped = [(order[name], at, descriptor, meta, known) for name, at, descriptor, meta, known in self.mapped]

        def start(stream: int, given: Sequence[Any]) -> None:
            values = flat.copy()
            for i, at in slots:
                values[at] = given[i]
            for i, at in pointers:
                x = given[i]
                values[at] = x if isinstance(x, int) else x.data_ptr()
            for i, at, descriptor, meta, known in mapped:
                x = given[i]
                address = x if isinstance(x, int) else x.data_ptr()
                found = known.get(address)
                if found is None:
                    if len(known) >= _MOST_MAPS:
                        known.clear()
                    found = known[address] = driver.make_tensordesc_arg(with_base(descriptor, Address(address)), meta)[
                        0
                    ]
                values[at] = found
            raw(programs, 1, 1, stream, *begin, None, None, None, *values)

        return start


def _direct(
    compiled: Any, arguments: Mapping[str, Any], places: dict[str, int], described: dict[str, Any]
) -> _Direct | None:
    """The C launcher; None for launchers that look different.

    The Python around it encodes the TMA descriptors anew. They depend on addresses alone here, and addresses come back.
    """
    from triton.backends.nvidia import driver

    run = compiled.run
    if getattr(driver, "_BASE_ARGS_FORMAT_LEN", None) != _BASE or run.global_scratch_size or run.profile_scratch_size:
        return None
    raw, metas = run.launch, getattr(compiled.metadata, "tensordesc_meta", None)
    if described:
        inner = dict(zip(raw.__code__.co_freevars, (c.cell_contents for c in raw.__closure__ or ()), strict=True))
        if set(inner) != {"launcher", "tensordesc_indices", "tensordesc_meta"} or not metas:
            return None
        raw = inner["launcher"]
    begin = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
    made = _Direct(raw, begin, [], [], [], [])
    metas = iter(metas or ())
    for name, x in arguments.items():
        if name in described:
            meta = next(metas)
            made.mapped.append((name, len(made.flat), described[name], meta, {}))
            made.flat.extend([None, *driver.make_tensordesc_arg(x, meta)[1:]])
            continue
        if name in places:
            (made.slots if isinstance(x, tuple) else made.pointers).append((name, len(made.flat)))
        made.flat.append(None if name in places else x)
    return made
