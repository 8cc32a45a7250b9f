"""The tracker's network as two networks without any Python between them: one for a new target, one for every frame."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmdet.families.siamese.model import SiamesePoint


@dataclass(frozen=True)
class NetworkPart:
    """A network with what an exporter must know of it."""

    name: str
    module: nn.Module  # in evaluation mode
    inputs: dict[str, Tensor]  # name -> example, in the order of the arguments
    outputs: tuple[str, ...]


class TemplateNet(nn.Module):
    """Template crop (1, 3, h, w) uint8 RGB -> what is kept of the target (1, C, h', w') float32."""

    def __init__(self, model: SiamesePoint) -> None:
        super().__init__()
        self.model = model

    def forward(self, template: Tensor) -> Tensor:
        return self.model.encode_template(template)


class SearchNet(nn.Module):
    """What is kept of the target and a search crop (1, 3, H, W) uint8 RGB -> score (1, H', W') in [0, 1] and distances left, top,
    right, bottom (1, 4, H', W') px."""

    def __init__(self, model: SiamesePoint) -> None:
        super().__init__()
        self.model = model

    def forward(self, state: Tensor, search: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.search(state, search)


def parts_of(model: SiamesePoint) -> list[NetworkPart]:
    """``template`` and ``search`` of a model in evaluation mode, on its device; examples are seeded noise."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    template, search = (
        torch.randint(0, 256, (1, 3, n, n), dtype=torch.uint8, generator=generator).to(device)
        for n in (model.exemplar_size, model.search_size)
    )
    with torch.no_grad():
        state = model.encode_template(template)
    return [
        NetworkPart("template", TemplateNet(model).eval(), {"template": template}, ("state",)),
        NetworkPart("search", SearchNet(model).eval(), {"state": state, "search": search}, ("score", "ltrb")),
    ]
