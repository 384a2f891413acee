"""The reasons of nodes: what decided them, what drew them to float32, and what edit would change that."""

from __future__ import annotations

from tests.report.test_explain import explained


def test_what_draws_a_node_to_float32_and_through_what() -> None:
    lines = explained("mul")
    assert lines[0] == "mul (mul) in module (root) runs in float32: it comes after softmax, which does."
    assert lines[2] == (
        "  placed: softmax (softmax) is deny, exponentials, logarithms and what is made of them "
        "(op_lists/base.yaml:33:100); reached through add (infer), relu (clear)."
    )
    assert (
        "mul under allow in a list of your own; or softmax, which draws it to float32, under infer or allow" in lines[3]
    )


def test_the_neighbours_that_made_it_cheapest() -> None:
    assert explained("relu")[2:4] == ["  placed: it reads add (float32).", "  placed: it is read by mul (float32)."]


def test_forced_nodes_say_what_could_be_done_instead() -> None:
    assert explained("mul_2")[1:3] == [
        "  decided: deny, other=1e+06 is beyond float16's range (forced:constant).",
        "  to change it: the number stands in the model's code: use a smaller one there.",
    ]
    assert explained("to")[2] == "  to change it: the model casts here itself: remove the cast in the model."
    assert "to draws it to float32, and the model casts here itself" in explained("argmax")[3]


def test_what_updates_a_buffer() -> None:
    assert explained("mul_1")[:3] == [
        "mul_1 (mul) in module (root) runs in float32: its category is deny.",
        "  decided: deny, leads to add_: it computes the next contents of average (forced:update).",
        "  to change it: a buffer takes what is computed here, in float32: set run to low in an edited plan.",
    ]
    assert explained("add_")[2:] == [
        "  placed: all that shares memory has one precision, and this memory is float32.",
        "  to change it: give what it writes into 16 bits in the model.",
    ]
