"""torch_geometric: message passing with several aggregations, attention, pooling and an object for a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data, HeteroData

from benchmarks.packages.case import Case, Given


def _graph(nodes: int = 20, edges: int = 60) -> Any:
    return Data(x=torch.randn(nodes, 8), edge_index=torch.randint(nodes, (2, edges)), edge_attr=torch.randn(edges, 4))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gcn = gnn.GCNConv(8, 16)
        self.gat = gnn.GATv2Conv(16, 8, heads=2, edge_dim=4)
        self.sage = gnn.SAGEConv(16, 16, aggr=["mean", "max", "std"])
        self.gin = gnn.GINEConv(gnn.MLP([16, 32, 16]), edge_dim=4)
        self.transformer = gnn.TransformerConv(16, 8, heads=2, edge_dim=4)
        self.norm = gnn.GraphNorm(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.gcn(x, edge_index).relu()
        x = self.gat(x, edge_index, edge_attr).relu()
        x = self.sage(x, edge_index).relu()
        x = self.norm(self.gin(x, edge_index, edge_attr))
        return self.last(self.transformer(x, edge_index, edge_attr))


def _layers() -> Given:
    graph = _graph()
    return (graph.x, graph.edge_index, graph.edge_attr), {}


class Pooled(nn.Module):
    """Reads a batch of graphs, which is an object of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.body = gnn.PNAConv(8, 16, ["mean", "max", "min", "std"], ["identity", "amplification"], torch.arange(9))
        self.pool = gnn.TopKPooling(16, ratio=0.5)
        self.last = nn.Linear(32, 2)

    def forward(self, data: Any) -> Tensor:
        x = self.body(data.x, data.edge_index).relu()
        x, _, _, batch, _, _ = self.pool(x, data.edge_index, data.edge_attr, data.batch)
        return self.last(torch.cat([gnn.global_mean_pool(x, batch), gnn.global_max_pool(x, batch)], -1))


def _batch() -> Given:
    return (Batch.from_data_list([_graph(10, 30) for _ in range(4)]),), {}


class Kinds(nn.Module):
    """Nodes of two kinds, in dictionaries by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = gnn.HeteroConv(
            {
                ("user", "buys", "item"): gnn.SAGEConv((8, 6), 16),
                ("item", "bought", "user"): gnn.GATConv((6, 8), 16, add_self_loops=False),
            }
        )
        self.last = gnn.HeteroDictLinear(16, 4, types=["user", "item"])

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor]) -> dict[str, Tensor]:
        return self.last({name: value.relu() for name, value in self.body(x, edges).items()})


def _kinds() -> Given:
    data = HeteroData()
    data["user"].x, data["item"].x = torch.randn(10, 8), torch.randn(12, 6)
    edges = torch.stack([torch.randint(10, (30,)), torch.randint(12, (30,))])
    data["user", "buys", "item"].edge_index = edges
    data["item", "bought", "user"].edge_index = edges.flip(0)
    return (data.x_dict, data.edge_index_dict), {}


CASES = (
    Case("convolutions and attention", lambda: Layers().train(), _layers),
    Case("batch of graphs, pooled", lambda: Pooled().train(), _batch),
    Case("nodes of two kinds", lambda: Kinds().train(), _kinds),
)
