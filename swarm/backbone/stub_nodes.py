"""Turns off what llama.cpp computes of stub experts, since nobody uses it.

From the stub's own matrix products to `ffn_moe_out`, which the hook overwrites, everything is computed of zeros of width 1. It
costs more than its arithmetic says: the down product alone is T x K x D dot products of length 1. (Measured on two threads,
D=2048, K=8, E=128: 49 us a layer for one token, 10 ms for 512.)

A node is *dead* if one of its sources is, and the stub's products are. A dead node's operation becomes NONE, which ggml passes
over. That is a change to one graph in memory: llama.cpp builds its graphs anew whenever their shape changes, and what it
uses again stays as it is, so that a graph's second pass costs one look at its first stub product.

*Memory.* llama.cpp sets memory aside for what it would compute of the stubs: K rows for each token, 34 MB for 512 of D=2048 and
K=8. As long as a layer's experts are computed elsewhere nothing that is still needed lies there, since all that comes before has
been read and nothing that lives comes between; so what other nodes have left there goes back to the system (`native/pages`), once
more at the end of a step. The stubs' weights are zeros that nobody reads: they go back at once.
"""

from __future__ import annotations

from swarm.native.ggml import op_code, set_tensor_op, tensor_at, tensor_name, tensor_op, tensor_source
from swarm.native.pages import give_back, give_back_pages

MAX_SOURCES = 10  # GGML_MAX_SRC, by the layout of ggml_tensor
STUB_WEIGHTS = ("_up_exps.weight", "_gate_exps.weight", "_gate_up_exps.weight")  # ends of their names in a GGUF file
VIEWS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")  # operations that compute nothing
# Least memory of a stub's product that is given back: of 128 rows of D=2048 with 8 experts each. Giving it back takes time
# (`native/pages`), which short steps would notice; they leave little there.
GIVEN_FROM_BYTES = 8 << 20


class StubNodes:
    """The dead nodes of one context's graphs. Ask in the graph's order, before anything of a layer's experts is computed."""

    def __init__(self) -> None:
        self._none = op_code("NONE")
        self._product = op_code("MUL_MAT_ID")
        self._views = frozenset(op_code(name) for name in VIEWS)
        self._products: set[int] = set()  # those turned off: NONE alone does not tell them from what follows them
        self._dead: set[int] = set()  # of the layer under way
        self._live: set[int] = set()  # what else is computed between its products and its output
        self._is_closed: dict[int, bool] = {}  # layer -> nothing else is computed between its products and its output
        # Addresses and sizes of pages that a product's result would take: of the layer under way, and by layer.
        self._result = (0, 0)
        self._results: dict[int, tuple[int, int]] = {}
        self._emptied: set[int] = set()  # stubs' weights that were given back

    @property
    def is_searching(self) -> bool:
        """Whether a layer's dead nodes are being looked for: every node up to its output must be shown to `follow`."""
        return bool(self._dead)

    def is_product(self, tensor: int) -> bool:
        """Return whether a node is a stub's product, or was one that is turned off.

        A second group of experts, which stays in the backbone, has products of the same name; their weights are called otherwise.
        """
        op = tensor_op(tensor)
        if op == self._product:
            weights = tensor_source(tensor, 0)
            return weights is not None and tensor_name(weights).endswith(STUB_WEIGHTS)
        return op == self._none and tensor in self._products

    def is_off(self, tensor: int) -> bool:
        """Return whether a node was turned off in an earlier pass over this graph."""
        return tensor_op(tensor) == self._none

    def start(self, tensor: int) -> None:
        """Turn off a stub's product."""
        self._kill(tensor)
        self._empty(tensor)
        self._products.add(tensor)
        self._live.discard(tensor)  # the second of a layer was followed like any node before its name was looked at

    def follow(self, tensor: int) -> None:
        """Turn the node off if it depends on a stub's product."""
        if tensor in self._dead:
            return
        for index in range(MAX_SOURCES):
            source = tensor_source(tensor, index)
            if source is None:
                break
            if source in self._dead:
                if tensor_op(tensor) == self._product:
                    self._empty(tensor)
                    if not self._live:
                        self._spare(tensor)
                self._kill(tensor)
                self._products.discard(tensor)
                return
        if tensor_op(tensor) not in self._views:
            self._live.add(tensor)

    def end(self, layer: int) -> None:
        """End the search at the layer's output."""
        self._is_closed[layer] = not self._live
        if layer in self._results:  # of a graph before this one, whose memory may be another's by now
            self._results.clear()
        self._results[layer] = self._result if not self._live else (0, 0)
        self.forget()

    def forget(self) -> None:
        """End the search wherever it is."""
        self._dead.clear()
        self._live.clear()
        self._result = (0, 0)

    def is_closed(self, layer: int) -> bool:
        """Return whether in the layer's latest new graph nothing was computed between stub products and output.

        If so, the products' inputs are untouched at the output still: nothing could have been written over them.
        """
        return self._is_closed.get(layer, False)

    def end_step(self, *, has_run: bool) -> None:
        """Give back where the results of the latest graph would lie: nothing that llama.cpp computes there outlives its step.

        `has_run`: the step was computed; else all that is known of its graph is forgotten.
        """
        if has_run:
            for address, size_bytes in set(self._results.values()):
                if size_bytes:
                    give_back_pages(address, size_bytes)
        self._results.clear()

    def _spare(self, product: int) -> None:
        """Give back where a product's result would lie, in a graph's first pass: at its turn nothing else lies there."""
        struct = tensor_at(product)
        if struct.ne[3] * struct.nb[3] >= GIVEN_FROM_BYTES:
            self._result = give_back(product)

    def _empty(self, product: int) -> None:
        """Give back a product's weights, if they are a stub's: of width 1, all zeros."""
        weights = tensor_source(product, 0)
        if weights is None or weights in self._emptied:
            return
        self._emptied.add(weights)
        if 1 in tensor_at(weights).ne[:2]:
            give_back(weights)

    def _kill(self, tensor: int) -> None:
        self._dead.add(tensor)
        set_tensor_op(tensor, self._none)
