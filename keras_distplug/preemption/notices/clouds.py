"""Detects the cloud that this machine belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from keras_distplug.preemption.notices.aws import AwsNotices
from keras_distplug.preemption.notices.azure import AzureNotices
from keras_distplug.preemption.notices.gce import GceNotices
from keras_distplug.preemption.notices.notice import Poll

Cloud = Literal["AWS", "GCE", "Azure"]
# All virtual machines of Azure have this tag, and no other Hyper-V machines.
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"


def detect(dmi: Path = Path("/sys/class/dmi/id")) -> Cloud | None:
    """Returns the cloud that this machine belongs to, or None.

    Reads the firmware's identification and sends no request, because outside a cloud, another
    server might receive it. Also returns None if the firmware is hidden, as in gVisor. Not verified
    on a real machine of any cloud.

    Args:
        dmi: Folder with the firmware's identification. Defaults to the one of Linux.
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
    """Returns the function that polls the metadata server of `cloud`."""
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
    except OSError:  # a file may be missing, or readable by root only
        return ""
