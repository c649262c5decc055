"""Whose machine this is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from keras_distplug.preemption.notices.aws import AwsNotices
from keras_distplug.preemption.notices.azure import AzureNotices
from keras_distplug.preemption.notices.gce import GceNotices
from keras_distplug.preemption.notices.notice import Poll

Cloud = Literal["AWS", "GCE", "Azure"]
# Of every virtual machine of Azure's, and of no other one of Hyper-V's.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def detect(dmi: Path = Path("/sys/class/dmi/id")) -> Cloud | None:
    """The cloud whose machine this is, or None.

    Reads what the firmware says, and asks nobody: where there is no metadata server, a question
    would go astray. None also where the firmware is hidden, as in gVisor. Not verified on a real
    machine of any of them.

    Args:
        dmi: The folder in which Linux shows it.
    """
    if _read(dmi / "sys_vendor") == "Amazon EC2":
        return "AWS"
    if _read(dmi / "bios_version").endswith(".amazon"):  # the older instances, on Xen
        return "AWS"
    if _read(dmi / "product_name") == "Google Compute Engine":
        return "GCE"
    if _read(dmi / "chassis_asset_tag") == _AZURE_TAG:
        return "Azure"
    return None


def poller(cloud: Cloud) -> Poll:
    """What asks the metadata server of `cloud`."""
    match cloud:
        case "AWS":
            return AwsNotices().poll
        case "GCE":
            return GceNotices().poll
        case "Azure":
            return AzureNotices().poll


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # not every machine has each, and some are for root only
        return ""
