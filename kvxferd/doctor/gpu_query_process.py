"""Reads the GPU driver's list of devices: `python -m kvxferd.doctor.gpu_query_process`."""

from __future__ import annotations

import json

from kvxferd.errors import KvxferdError
from kvxferd.memory.driver_registry import open_driver


def main() -> None:
    """Print the devices as one line of JSON."""
    try:
        driver = open_driver()
        result = {
            "name": driver.name,
            "describe": driver.describe(),
            "devices": [device._asdict() for device in driver.devices()],
        }
    except KvxferdError as error:
        result = {"refusal": error.message}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
