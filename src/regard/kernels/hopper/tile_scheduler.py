"""Who has which rows, which blocks of keys they meet, and the warp that copies these into shared memory."""
# Written for Triton's compiler, which has types of its own.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..portable.tile_ops import _BITS, _SPANS, block_list_start, block_range
from . import ptx
from .configs import ROWS as _ROWS

ROWS = gl.constexpr(_ROWS)
PLAN = gl.constexpr(20)  # numbers that are noted of a block of rows
SHARES, LEFT = gl.constexpr(8), gl.constexpr(17)  # where those of each group begin: three by the copying warp, one by the group
OFTEN = gl.constexpr(4)  # one block of rows in so many came again
TAKE, SPREAD = gl.constexpr(ptx.TAKE), gl.constexpr(ptx.SPREAD)
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def place(t, blocks, owners, section):
    """The t-th block of rows and whose it is. `section` owners share the cache; of theirs the last rows come first."""
    part = t // (section * blocks)
    t -= part * (section * blocks)
    width = gl.minimum(section, owners - part * section)
    return blocks - 1 - t // width, part * section + t % width


@gluon.jit
def new_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """So many barriers, each of which is passed when so many have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(COUNT):
        mbarrier.init(made.index(s), count=arrivals)
    return made


@gluon.jit
def row_of(block, n, blocks, G: gl.constexpr, GROUPS: gl.constexpr):
    """The first row of group G of a block.

    Where the groups of the last block would not all have rows, those that have none are the first of the first block
    instead, and are told rows beyond the last: of a causal mask the first block is the shortest.
    """
    at = block * GROUPS + G
    if GROUPS == 3:
        at -= blocks * GROUPS - gl.cdiv(n, ROWS)
        at = gl.where(at < 0, at + blocks * GROUPS, at)
    return at * ROWS


@gluon.jit
def advance(stage, parity, STAGES: gl.constexpr):
    """The next stage; each time round, its barriers are in the other parity."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, parity ^ 1, parity)


@gluon.jit
def walk_of(where, item, h, block, M, BN: gl.constexpr, MASK: gl.constexpr):
    """What a block of rows meets: (first partial, first full, behind the full, how many full, how many in all)."""
    first, full, until, rest = block_range(where, block_list_start(where, item, h, MASK), block, gl.cdiv(M, BN), M // BN, MASK)
    return first, full, until, until - full, until - full + rest


@gluon.jit
def share_of(where, item, h, row, first, full, whole, total, n, BN: gl.constexpr, MASK: gl.constexpr):
    """From which of the blocks that are met a group's own ROWS rows see some keys, and from which on they see all.

    Of spans, the blocks that the last rows of a block of rows see alone come first. So a group leaves these out; and where
    its rows see the first block whole, its own full ones begin early. Rows that see none, as those beyond the last, leave out all.
    """
    rest = total - whole
    start, entire = 0, rest
    none = total == 0
    if MASK == _SPANS:
        at = (item // gl.load(where.inner)).to(gl.int64) * where.item + h * where.head
        last = gl.minimum(row + ROWS, n) - 1
        begin, until, behind = gl.load(where.lo + at + last), gl.load(where.hi + at + gl.minimum(row, n - 1)), gl.load(where.hi + at + last)
        seen = gl.maximum(gl.cdiv(behind, BN) - first, 0)  # blocks until there
        start = gl.minimum(gl.maximum(total - seen, 0), rest - (full - first))
        entire = gl.where(begin <= first * BN, gl.minimum(gl.maximum(total - (until // BN - first), start), rest), rest)
        none = none | ((seen == 0) & (whole == 0))
    none = gl.where(row < n, none, True)
    return gl.where(none, gl.maximum(total, 1), start), gl.where(none, gl.maximum(total, 1), entire)


@gluon.jit
def blind_from(clear, count, whole, total, careful):
    """From which of the blocks that are met on a group folds them blindly; `clear` is its own first that hides nothing.

    Before these come all that hide something from a row of the block, and the first full one: there sinks of attention are,
    and by then each row has a level, also one beyond the last, from which a partial block is hidden. With care, none.
    """
    return gl.where(careful > 0, count, gl.minimum(gl.maximum(clear, total - whole + 1), count))


@gluon.jit
def leap_often(leaps, block, blocks):
    """Whether so many of a head's blocks of rows from `block` on came again that it is better to meet this one with care.

    One that comes again is met twice, the second time with care. A careful step has about 1.4 times the instructions of a blind one.
    """
    return gl.where(leaps * OFTEN > blocks - block, 1, 0)


@gluon.jit
def entry_at(where, t, first, full, until, whole, total, MASK: gl.constexpr):
    """The t-th block that is met: the partial ones backwards, then the full ones; of lists also its place, and whether it is partial."""
    rest = total - whole
    u = t - rest  # among the full ones
    if MASK == _BITS:
        at = first + rest - 1 - t
        partial = u < 0
        b = gl.load(where.full_entry + full + u, mask=(u >= 0) & (t < total), other=0)
        b += gl.load(where.entry + at, mask=partial, other=0)
    else:
        at = 0
        partial = True
        behind = rest - (full - first)  # how many there are behind the full ones; the others are before them
        b = gl.where(u >= 0, full + u, gl.where(t < behind, until + behind - 1 - t, full + behind - 1 - t))
    return b, at, partial


@gluon.jit
def block_at(where, t, first, full, until, whole, total, G: gl.constexpr, GROUPS: gl.constexpr, MASK: gl.constexpr):
    """The t-th block that is met, and the slot of group G's bits, −1 where it sees none of them; block 0 for rows that meet none."""
    b, at, partial = entry_at(where, t, first, full, until, whole, total, MASK)
    slot = 0
    if MASK == _BITS:
        PART: gl.constexpr = 128 if GROUPS == 2 else 64  # rows that share a slot
        OWN: gl.constexpr = GROUPS * ROWS // PART  # slots of an entry
        slot = gl.load(where.slot + at * OWN + G * ROWS // PART, mask=partial, other=0)  # slot 0 is all ones
        slot = gl.where(total > 0, slot, -1)
    return b, slot


@gluon.jit
def note(plan, at, number, WARPS: gl.constexpr):
    """Leave a number in the plan, by so many warps."""
    plan.index(at).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon.jit
def told(plan, at, WARPS: gl.constexpr):
    """A number of the plan, for so many warps."""
    return gl.max(plan.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def seats_of(plan, at, G: gl.constexpr):
    """What is noted of a block of rows: (whether it is met with care, item, head, first, full, until, how many, and the group's own:
    its first row, and `share_of`)."""
    own = at + SHARES + 3 * G
    return (told(plan, at + 1, 4), told(plan, at + 2, 4), told(plan, at + 3, 4), told(plan, at + 4, 4), told(plan, at + 5, 4), told(plan, at + 6, 4),
            told(plan, at + 7, 4), told(plan, own, 4), told(plan, own + 1, 4), told(plan, own + 2, 4))


@gluon.jit
def copy(given, KIND: gl.constexpr):
    """The warp that copies: of each block of rows first Q, then K and V of all it meets, as soon as a stage is free."""
    where, n, blocks, owners, counter, plan = given.where, given.n, given.blocks, given.owners, given.counter, given.plan
    q, qb, k, kb, v, vb, _, _ = given.described
    Q, QB, K, KB, V, VB = given.X
    q_ready, q_free, k_ready, k_free, v_ready, v_free = given.barriers
    DA: gl.constexpr = KIND.DA
    DB: gl.constexpr = KIND.DB
    EA: gl.constexpr = KIND.EA
    EB: gl.constexpr = KIND.EB
    BN: gl.constexpr = KIND.BN
    GROUPS: gl.constexpr = KIND.GROUPS
    MASK: gl.constexpr = KIND.MASK
    PERSISTENT: gl.constexpr = KIND.PERSISTENT
    stage = 0
    parity = 1  # of a free stage: the phase before the first counts as done
    q_stage = 0
    q_parity = 1
    QS: gl.constexpr = 2 if PERSISTENT else 1
    t = gl.program_id(0)
    if PERSISTENT:
        for u in gl.static_range(QS):
            for g in gl.static_range(GROUPS):
                note(plan, u * PLAN + LEFT + g, 0, 1)
    idle = 0  # how many times in a row there was nothing to do
    while idle < 2:
        now = t
        again = 0
        at = q_stage * PLAN
        if PERSISTENT:
            mbarrier.wait(q_free.index(q_stage), q_parity)
            for g in gl.static_range(GROUPS):
                again |= told(plan, at + LEFT + g, 1)
            now = gl.where(again > 0, told(plan, at, 1), t)
        if now < blocks * owners:
            block, own = place(now, blocks, owners, given.section)
            item, h = own // given.heads, own % given.heads
            kv = h // given.groups
            first, full, until, whole, total = walk_of(where, item, h, block, given.M, BN, MASK)
            after = 0
            if PERSISTENT:
                leaps = counter + 1 + own  # how many blocks of rows of this head came again, by any program
                if again > 0:
                    gl.inline_asm_elementwise(TAKE, "=r,l", [leaps], gl.int32, False, 1)
                careful = leap_often(gl.load(leaps, volatile=True), block, blocks)
                note(plan, at, now, 1)
                note(plan, at + 1, gl.where(again > 0, 1, careful), 1)
                note(plan, at + 2, item, 1)
                note(plan, at + 3, h, 1)
                note(plan, at + 4, first, 1)
                note(plan, at + 5, full, 1)
                note(plan, at + 6, until, 1)
                note(plan, at + 7, total, 1)
                for g in gl.static_range(GROUPS):
                    row = row_of(block, n, blocks, g, GROUPS)
                    if again > 0:
                        row = gl.where(told(plan, at + LEFT + g, 1) > 0, row, blocks * GROUPS * ROWS)  # a group that is done has none
                    start, entire = share_of(where, item, h, row, first, full, whole, total, n, BN, MASK)
                    own_at = at + SHARES + 3 * g
                    note(plan, own_at, row, 1)
                    note(plan, own_at + 1, start, 1)
                    note(plan, own_at + 2, entire, 1)
                if again == 0:
                    after = gl.inline_asm_elementwise(TAKE, "=r,l", [counter], gl.int32, False, 1)  # there when it is needed
            ready = q_ready.index(q_stage)
            mbarrier.expect(ready, GROUPS * ROWS * (DA + DB) * 2)
            for g in gl.static_range(GROUPS):
                row = row_of(block, n, blocks, g, GROUPS)
                tma_load(q, [item, h, row, 0], ready, Q.index(q_stage * GROUPS + g))
                if DB > 0:
                    tma_load(qb, [item, h, row, DA], ready, QB.index(q_stage * GROUPS + g))
            for s in range(gl.maximum(total, 1)):
                b, slot = block_at(where, s, first, full, until, whole, total, 0, GROUPS, MASK)
                mbarrier.wait(k_free.index(stage), parity)
                mbarrier.expect(k_ready.index(stage), BN * (DA + DB) * 2)
                tma_load(k, [item, kv, b * BN, 0], k_ready.index(stage), K.index(stage))
                if DB > 0:
                    tma_load(kb, [item, kv, b * BN, DA], k_ready.index(stage), KB.index(stage))
                mbarrier.wait(v_free.index(stage), parity)
                mbarrier.expect(v_ready.index(stage), BN * (EA + EB) * 2)
                tma_load(v, [item, kv, b * BN, 0], v_ready.index(stage), V.index(stage))
                if EB > 0:
                    tma_load(vb, [item, kv, b * BN, EA], v_ready.index(stage), VB.index(stage))
                stage, parity = advance(stage, parity, KIND.STAGES)
            idle = 0
            if PERSISTENT:
                if again == 0:
                    t = gl.num_programs(0) + gl.inline_asm_elementwise(SPREAD, "=r,r", [after], gl.int32, False, 1)
            else:
                idle = 2
        else:  # once so that the groups tell of the block before; then, if they left nothing, there is no more
            note(plan, at, blocks * owners + idle, 1)
            mbarrier.arrive(q_ready.index(q_stage))
            idle += 1
        q_stage, q_parity = advance(q_stage, q_parity, QS)
