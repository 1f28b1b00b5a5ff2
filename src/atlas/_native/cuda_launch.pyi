from collections.abc import Callable

class CudaLaunchList:
    names: list[str]
    keep: list[object]
    def __init__(self, launch_address: int) -> None: ...
    def __len__(self) -> int: ...
    def append_kernel(
        self,
        name: str,
        function: int,
        grid: tuple[int, ...],
        threads: int,
        shared_bytes: int,
        cluster: int,
        dependent: bool,
        args: tuple[int, ...],
    ) -> None: ...
    def append_matmul(self, function: int, args: tuple[int, ...]) -> None: ...
    def append_call(self, function: Callable[[int], None]) -> None: ...
    def run(self, stream: int) -> tuple[int, str | None]: ...
