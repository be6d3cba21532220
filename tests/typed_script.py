"""A user's program, checked strictly by mypy; a mistake in it that mypy does not find makes its ``ignore`` unused."""
# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, warn-return-any, strict-equality

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    import deepmemory as dm
    from deepmemory import export

    rnn = dm.DMU(10, 64, batch_first=True, transition=[32], activation="silu")
    output, h_n = rnn(torch.randn(2, 5, 10), lengths=torch.tensor([5, 3]))
    h: torch.Tensor = dm.DMUCell(3, 4)(torch.zeros(1, 3))
    optimiser = torch.optim.Adam(dm.parameter_groups(rnn, lr=0.1))
    layers: list[torch.nn.Module] = [dm.RHN(3, 4, depth=2), dm.RNN(3, 4), dm.GRU(3, [4, 5]), dm.LSTM(3, 4, proj_size=2)]
    ready: bool = dm.engines()["cpu"].available
    satisfied: bool = dm.gradients.condition(rnn).satisfied
    program: torch.export.ExportedProgram = export.program(rnn, {"input": torch.zeros(2, 5, 10)})
    export.save(rnn, {"input": torch.zeros(2, 5, 10)}, "model.onnx", sizes={"input": {0: "batch"}})
    version: str = dm.__version__

    dm.DMU(10, "64")  # type: ignore[arg-type]
    dm.DMU(10, 64, transitions=[3])  # type: ignore[call-arg]
