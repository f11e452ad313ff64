"""The users of locustfile.py, more of them step by step: where throughput stops to grow is what the server can do.

locust -f loadtest/locust_steps.py --host 127.0.0.1:50051 --headless --step-users 10 --step-seconds 30 --steps 6
"""

from __future__ import annotations

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser

from embedserve.loadtest.locustfile import EmbedserveUser

__all__ = ["EmbedserveUser", "Steps"]


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("embedserve steps")
    group.add_argument(
        "--step-users", type=int, default=10, help="users that each step adds", env_var="LOCUST_STEP_USERS"
    )
    group.add_argument(
        "--step-seconds", type=float, default=30, help="how long a step lasts", env_var="LOCUST_STEP_SECONDS"
    )
    group.add_argument("--steps", type=int, default=6, help="how many there are", env_var="LOCUST_STEPS")


class Steps(LoadTestShape):
    """Ends after the last step."""

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        step = int(self.get_run_time() // options.step_seconds) + 1
        if step > options.steps:
            return None
        return step * options.step_users, float(options.step_users)
