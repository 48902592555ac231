"""Our kernels as a provider of the peer benchmark, which times them beside other engines' kernels.

The benchmark gives `Base` and `register`, and cold inputs of one MoE layer: x (M, H), act (M*K, I),
out1 (M, K, 2I) and out2 (M, K, H), to which the gate_up and the down delta are added.
"""

from typing import Any

import torch
from providers import Base, register

from moelora.kernels import (
    MoeLoraRouting,
    allocate_workspace,
    build_routing,
    fused_moe_lora,
    fused_moe_lora_activation,
)


@register
class Ours(Base):
    name = "ours"
    block_m: int | None = None

    def __init__(self, c: Any, w: Any, dev: torch.device) -> None:
        super().__init__(c, w, dev)
        self.ws = allocate_workspace(
            num_tokens=c.M, top_k=self.d["K"], num_adapters=c.L, num_local_experts=self.d["E"],
            columns=2 * c.r, device=dev,
        )  # fmt: skip
        factors = (w.a_gu, w.b_gu, w.a_d, w.b_d)
        self.group_elements = sum(f.shape[2] * f.shape[3] for f in factors)
        # in prefill the variant that ends gate_up in the activation is measured too
        self.fused_act = c.M >= 1024
        self.act = None
        if self.fused_act:
            shape = (c.M, self.d["K"], self.d["I"])
            self.act = torch.empty(shape, dtype=torch.bfloat16, device=dev)
        # the factors do not change: what an engine passes as alpha / r of each adapter
        self.scaling = torch.ones(c.L, 1, 1, dtype=torch.float32, device=dev)

    def align(self, inp: Any) -> MoeLoraRouting:
        return build_routing(
            inp.ids, inp.map, num_adapters=self.c.L, num_local_experts=self.d["E"],
            num_global_experts=self.d["EG"], rank=self.c.r, group_elements=self.group_elements,
            block_m=self.block_m, workspace=self.ws,
        )  # fmt: skip

    def gu(self, inp: Any, st: MoeLoraRouting) -> None:
        fused_moe_lora(
            inp.out1, inp.x, self.w.a_gu, self.w.b_gu, inp.ids, inp.map,
            scaling=self.scaling, a_slices=2, routing=st, workspace=self.ws,
        )  # fmt: skip

    def dn(self, inp: Any, st: MoeLoraRouting) -> None:
        act = inp.act.view(*inp.ids.shape, -1)
        fused_moe_lora(
            inp.out2, act, self.w.a_d, self.w.b_d, inp.ids, inp.map,
            scaling=self.scaling, topk_weights=inp.tw, a_slices=1, routing=st, workspace=self.ws,
        )  # fmt: skip

    def gu_act(self, inp: Any, st: MoeLoraRouting) -> None:
        fused_moe_lora_activation(
            self.act, inp.out1, inp.x, self.w.a_gu, self.w.b_gu, inp.ids, inp.map,
            activation="silu", scaling=self.scaling, a_slices=2, routing=st, workspace=self.ws,
        )  # fmt: skip

    def act_rows(self, inp: Any) -> torch.Tensor:
        return self.act.view(-1, self.d["I"])
