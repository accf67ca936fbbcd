"""The reader of machine code, on a few lines of it."""

from __future__ import annotations

from sass import inner_loops, lost_operands

LOOP = """
        /*0100*/                   LDSM.16.M88.4 R152, [R194] ;
        /*0110*/                   {fill} ;
        /*0120*/                   HGMMA.64x64x16.F32.BF16 R56, R152, gdesc[UR32], RZ, !UPT ;
        /*0130*/                   {after} ;
        /*0140*/              @P0 BRA 0x110 ;
"""


def test_an_operand_that_is_overwritten_in_the_loop_is_found() -> None:
    told = lost_operands(LOOP.format(fill="NOP", after="FMUL R153, R68, UR15"))
    assert told == ["0120 HGMMA.64x64x16.F32.BF16 R56, R152, gdesc[UR32], RZ, !UPT"]


def test_an_operand_that_stays_or_is_filled_again_is_right() -> None:
    assert lost_operands(LOOP.format(fill="NOP", after="FMUL R156, R68, UR15")) == []
    assert lost_operands(LOOP.format(fill="LOP3.LUT R153, R9, UR17, RZ, 0x3c, !PT", after="FMUL R153, R68, UR15")) == []
    assert lost_operands(LOOP.format(fill="NOP", after="STS.64 [R153], R152")) == []


def test_a_load_of_several_registers_overwrites_them_all() -> None:
    assert lost_operands(LOOP.format(fill="NOP", after="LDS.128 R152, [R3]"))
    assert lost_operands(LOOP.format(fill="NOP", after="LDS.64 R150, [R3]")) == []


def test_a_loop_is_found_by_its_label_too() -> None:
    sass = LOOP.format(fill="NOP", after="FMUL R153, R68, UR15").replace(
        "        /*0110*/", ".L_x_3:\n        /*0110*/"
    )
    labelled = sass.replace("BRA 0x110", "BRA `(.L_x_3)")
    assert lost_operands(labelled) == lost_operands(sass) != []
    assert [len(loop) for loop in inner_loops(labelled)] == [4]


def test_a_wait_that_tries_again_behind_the_code_is_no_loop() -> None:
    again = """
        /*0150*/                   FMUL R153, R68, UR15 ;
        /*0160*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9], R2 ;
        /*0170*/              @!P1 BRA 0x160 ;
        /*0180*/                   BRA 0x118 ;
"""
    long = LOOP.replace("/*0100*/", "/*0010*/").replace("/*0110*/", "/*0020*/").replace("0x110", "0x20")
    sass = long.format(fill="FMUL R153, R68, UR15", after="NOP") + again
    assert lost_operands(sass) == []
    assert lost_operands(sass.replace("BRA 0x118", "@P0 BRA 0x118")) != []
    assert [len(loop) for loop in inner_loops(sass, "HGMMA")] == [4]
