"""Every private or version-dependent symbol of Triton that the package uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["INTERPRETED", "Address", "load", "starter", "with_base"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs its kernels in Python; it reads this once, too
_MOST_MAPS = 256  # addresses whose TMA descriptors are kept for each argument
_BASE = 13  # arguments of Triton 3.6's launcher before those of the kernel


class Address(int):
    """A place in the memory of a GPU, for a kernel that takes a tensor there; no tensor is made for it."""

    def data_ptr(self) -> int:
        return self


def load(compiled: Any) -> Any:
    """Build a kernel's launcher, for which Triton 3.6 calls a C compiler, and load its code onto the current device."""
    return (compiled.result() if hasattr(compiled, "result") else compiled).run


def with_base(descriptor: Any, x: Any) -> Any:
    """The same TMA descriptor for another tensor, which is not checked again."""
    twin = object.__new__(type(descriptor))
    twin.__dict__.update(descriptor.__dict__, base=x)
    return twin


def starter(compiled: Any, programs: int, arguments: Mapping[str, Any], changing: Any) -> Callable[..., None]:
    """A function that starts a compiled kernel on the current stream, with other values of the changing arguments.

    `arguments` are all arguments in order, of which nothing in `changing` is kept; what is None there stays None. The
    function is the kernel's own launcher; `kernel[grid]` inspects each argument first, and tells profilers about it.
    Tensors may be given as an `Address`.
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
    direct = _direct(compiled, programs, arguments, places, described)

    def start(**given: Any) -> None:
        watched = _set(hooks.launch_enter_hook) or _set(hooks.launch_exit_hook)
        if direct is not None and not watched:
            direct(stream(device), given)
            return
        values = template.copy()
        for name, at in places.items():
            x = given[name]
            values[at] = with_base(described[name], x) if name in described else x
        if watched:
            by_grid(*values)
        else:
            run(programs, 1, 1, stream(device), function, metadata, None, None, None, *values)

    return start


def _holds_tensors(x: Any) -> bool:
    return any(map(_holds_tensors, x)) if isinstance(x, tuple) else hasattr(x, "data_ptr") or hasattr(x, "block_shape")


def _set(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


def _direct(
    compiled: Any, programs: int, arguments: Mapping[str, Any], places: dict[str, int], described: dict[str, Any]
) -> Callable[[int, Mapping[str, Any]], None] | None:
    """The C launcher of Triton 3.6 without its Python around it; None for launchers that look different.

    That Python encodes the TMA descriptors anew. They depend on addresses alone here, and addresses come back.
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
    flat: list[Any] = []
    slots: list[tuple[str, int]] = []  # of tuples
    pointers: list[tuple[str, int]] = []  # of tensors: the launcher asks the driver about an address that is no number
    mapped: list[tuple[str, int, Any, Any, dict[int, Any]]] = []  # and the descriptors by address
    metas = iter(metas or ())
    for name, x in arguments.items():
        if name in described:
            meta = next(metas)
            mapped.append((name, len(flat), described[name], meta, {}))
            flat += [None, *driver.make_tensordesc_arg(x, meta)[1:]]
            continue
        if name in places:
            (slots if isinstance(x, tuple) else pointers).append((name, len(flat)))
        flat.append(None if name in places else x)
    begin = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)

    def direct(stream: int, given: Mapping[str, Any]) -> None:
        values = flat.copy()
        for name, at in slots:
            values[at] = given[name]
        for name, at in pointers:
            values[at] = given[name].data_ptr()
        for name, at, descriptor, meta, known in mapped:
            x = given[name]
            address = x.data_ptr()
            found = known.get(address)
            if found is None:
                if len(known) >= _MOST_MAPS:
                    known.clear()
                found = known[address] = driver.make_tensordesc_arg(with_base(descriptor, x), meta)[0]
            values[at] = found
        raw(programs, 1, 1, stream, *begin, None, None, None, *values)

    return direct
