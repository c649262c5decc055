"""The answers of every cloud's metadata server, according to its documentation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mock_metadata import Answer, Mock, reply, silence

from keras_distplug.core.errors import MetadataError
from keras_distplug.preemption.notices.aws import AwsNotices
from keras_distplug.preemption.notices.azure import AzureNotices
from keras_distplug.preemption.notices.clouds import Cloud, detect, poller
from keras_distplug.preemption.notices.gce import GceNotices
from keras_distplug.preemption.notices.notice import Notice

pytestmark = pytest.mark.timeout(30)

TOKEN = "PUT /latest/api/token"
ACTION = "GET /latest/meta-data/spot/instance-action"
REBALANCE = "GET /latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "GET /computeMetadata/v1/instance/preempted"
MAINTENANCE = "GET /computeMetadata/v1/instance/maintenance-event"
EVENTS = "GET /metadata/scheduledevents?api-version=2020-07-01"
NAME = "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text"
AT = 1505722920.0  # 2017-09-18 08:22 UTC


def google(value: str, status: int = 200) -> Answer:
    return reply(value, status, Metadata_Flavor="Google")


def events(*listed: object) -> Answer:
    return reply(json.dumps({"DocumentIncarnation": 1, "Events": listed}))


def event(kind: object = "Preempt", not_before: object = "", names: object = ("vm_0",)) -> object:
    return {"EventType": kind, "NotBefore": not_before, "Resources": names}


@pytest.fixture
def far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets a time zone nine hours ahead of UTC."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "EAST-9")
        time.tzset()
        yield
    time.tzset()


class TestAws:
    @pytest.fixture
    def aws(self, mock: Mock) -> AwsNotices:
        mock.answers[TOKEN] = [reply("token-1"), reply("token-2"), reply("token-3")]
        return AwsNotices(mock.base_url, 20)

    def test_nothing(self, aws: AwsNotices, mock: Mock) -> None:
        """Two 404s mean that there is no notice; a token is used for many polls."""
        assert aws.poll() is None
        assert aws.poll() is None
        assert mock.asked == [TOKEN, ACTION, REBALANCE, ACTION, REBALANCE]
        assert mock.headers[0]["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        assert {each["x-aws-ec2-metadata-token"] for each in mock.headers[1:]} == {"token-1"}

    @pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
    def test_interruption(self, action: str, aws: AwsNotices, mock: Mock) -> None:
        """An interruption is final, has a time, and takes precedence over a recommendation."""
        mock.answers[REBALANCE] = [reply('{"noticeTime": "2017-09-18T08:20:00Z"}')]
        body = {"action": action, "time": "2017-09-18T08:22:00Z"}
        mock.answers[ACTION] = [reply(json.dumps(body))]
        assert aws.poll() == Notice("AWS", f"spot instance-action {action}", AT, True)

    @pytest.mark.usefixtures("far_east")
    def test_time_without_a_zone(self, aws: AwsNotices, mock: Mock) -> None:
        """A time is in UTC, whatever this machine's time zone is."""
        mock.answers[ACTION] = [reply('{"action": "stop", "time": "2017-09-18T08:22:00"}')]
        notice = aws.poll()
        assert notice is not None
        assert notice.at_unix_s == AT

    @pytest.mark.parametrize("when", ["soon", "", None, 7, [], "2017-99-99T08:22:00Z"])
    def test_unreadable_time(self, when: object, aws: AwsNotices, mock: Mock) -> None:
        """An interruption counts even if its time is unreadable."""
        mock.answers[ACTION] = [reply(json.dumps({"action": "stop", "time": when}))]
        assert aws.poll() == Notice("AWS", "spot instance-action stop", None, True)

    def test_recommendation(self, aws: AwsNotices, mock: Mock) -> None:
        """A rebalance recommendation is not final and has no time."""
        mock.answers[REBALANCE] = [reply('{"noticeTime": "2017-09-18T08:22:00Z"}')]
        assert aws.poll() == Notice("AWS", "rebalance recommendation", None, False)

    @pytest.mark.parametrize("place", [ACTION, REBALANCE])
    def test_expired_token(self, place: str, aws: AwsNotices, mock: Mock) -> None:
        """After a 401, a new token is fetched, and the request is repeated with it."""
        mock.answers[place] = [reply(status=401), reply(status=404)]
        assert aws.poll() is None
        assert mock.asked.count(TOKEN) == 2
        asked_again = len(mock.asked) - 1 - mock.asked[::-1].index(place)
        assert mock.headers[asked_again]["x-aws-ec2-metadata-token"] == "token-2"

    def test_token_never_accepted(self, aws: AwsNotices, mock: Mock) -> None:
        """A new token is fetched once per request, which avoids an endless loop."""
        mock.answers[ACTION] = [reply(status=401)]
        with pytest.raises(MetadataError, match=r"expected status 200. Received: status 401"):
            aws.poll()
        assert mock.asked == [TOKEN, ACTION, TOKEN, ACTION]

    @pytest.mark.parametrize(
        "answer",
        [reply("x", 403), reply(""), reply("<html>\n</html>"), reply("a\r\nB: c"), reply("ä")],
    )
    def test_no_token(self, answer: Answer, aws: AwsNotices, mock: Mock) -> None:
        """An invalid token is not used."""
        mock.answers[TOKEN] = [answer]
        with pytest.raises(MetadataError, match="expected a token"):
            aws.poll()
        assert mock.asked == [TOKEN]

    def test_token_timeout(self, mock: Mock) -> None:
        """In a container beyond the hop limit, the answer to PUT is lost; the error says so."""
        mock.answers[TOKEN] = [silence]
        with pytest.raises(MetadataError, match=r"within 0\.2 s.*HttpPutResponseHopLimit"):
            AwsNotices(mock.base_url, 0.2).poll()

    @pytest.mark.parametrize(
        ("place", "answer"),
        [
            (ACTION, reply("x", 500)),
            (ACTION, reply("<html>")),
            (ACTION, reply("{}")),
            (ACTION, reply('{"action": 1}')),
            (REBALANCE, reply("x", 503)),
            (REBALANCE, reply("{}")),
            (REBALANCE, reply("[]")),
        ],
    )
    def test_garbage(self, place: str, answer: Answer, aws: AwsNotices, mock: Mock) -> None:
        mock.answers[place] = [answer]
        with pytest.raises(MetadataError, match=rf"{place.removeprefix('GET ')}: expected "):
            aws.poll()


class TestGce:
    @pytest.fixture
    def gce(self, mock: Mock) -> GceNotices:
        mock.answers[PREEMPTED] = [google("FALSE")]
        mock.answers[MAINTENANCE] = [google("NONE\n")]
        return GceNotices(mock.base_url, 20)

    def test_nothing(self, gce: GceNotices, mock: Mock) -> None:
        assert gce.poll() is None
        assert mock.asked == [PREEMPTED, MAINTENANCE]
        assert [each["metadata-flavor"] for each in mock.headers] == ["Google"] * 2

    def test_preempted(self, gce: GceNotices, mock: Mock) -> None:
        """Preemption is final, and no further request is sent in the remaining 30 seconds."""
        mock.answers[PREEMPTED] = [google("TRUE")]
        assert gce.poll() == Notice("GCE", "preemption", None, True)
        assert mock.asked == [PREEMPTED]

    @pytest.mark.parametrize(("what", "is_final"), [("TERMINATE", True), ("MIGRATE", False)])
    def test_maintenance(self, what: str, is_final: bool, gce: GceNotices, mock: Mock) -> None:
        """Maintenance that terminates the machine is final, migration is not."""
        value = f"{what}_ON_HOST_MAINTENANCE"
        mock.answers[MAINTENANCE] = [google(value)]
        assert gce.poll() == Notice("GCE", f"maintenance-event {value}", None, is_final)

    @pytest.mark.parametrize("place", [PREEMPTED, MAINTENANCE])
    @pytest.mark.parametrize(
        ("answer", "complaint"),
        [
            (reply("TRUE"), "expected Google's server"),
            (reply("TRUE", Metadata_Flavor="Else"), "expected Google's server"),
            (google("TERMINATE_ON_HOST_MAINTENANCE TRUE"), "expected one of"),
            (google("TRUE", status=500), "expected one of"),
            (google("not found", status=404), "expected one of"),
            (google(""), "expected one of"),
            (google("<html>"), "expected one of"),
        ],
    )
    def test_garbage(
        self, place: str, answer: Answer, complaint: str, gce: GceNotices, mock: Mock
    ) -> None:
        """An answer from another server, or with an unknown value, is an error."""
        mock.answers[place] = [answer]
        with pytest.raises(MetadataError, match=complaint):
            gce.poll()


class TestAzure:
    @pytest.fixture
    def azure(self, mock: Mock) -> AzureNotices:
        mock.answers[NAME] = [reply("Vm_0\n")]
        return AzureNotices(mock.base_url, 20)

    def test_nothing(self, azure: AzureNotices, mock: Mock) -> None:
        mock.answers[EVENTS] = [events()]
        assert azure.poll() is None
        assert mock.asked == [EVENTS]
        assert mock.headers[0]["metadata"] == "true"

    @pytest.mark.parametrize(
        ("kind", "is_final"),
        [
            ("Preempt", True),
            ("Reboot", True),
            ("Redeploy", True),
            ("Terminate", True),
            ("Freeze", False),
            ("SomethingNew", False),
        ],
    )
    def test_kinds(self, kind: str, is_final: bool, azure: AzureNotices, mock: Mock) -> None:
        """Events that lose this machine's memory are final."""
        mock.answers[EVENTS] = [events(event(kind, "Mon, 18 Sep 2017 08:22:00 GMT"))]
        assert azure.poll() == Notice("Azure", f"scheduled event {kind}", AT, is_final)

    @pytest.mark.parametrize(
        "not_before",
        ["", None, "soon", 3, [], "Mon, 99 Sep 2017 08:22:00", f"18 Sep {9**99} 08:22:00 GMT"],
    )
    def test_without_time(self, not_before: object, azure: AzureNotices, mock: Mock) -> None:
        """Events that have started or have an unreadable time count."""
        mock.answers[EVENTS] = [events(event(not_before=not_before))]
        assert azure.poll() == Notice("Azure", "scheduled event Preempt", None, True)

    def test_other_machines(self, azure: AzureNotices, mock: Mock) -> None:
        """Events of other machines are ignored; names are case-insensitive.

        This machine's own name is requested only once.
        """
        mock.answers[EVENTS] = [events(event(names=["vm_1"])), events(event(names=["a", "VM_0"]))]
        assert azure.poll() is None
        assert azure.poll() == Notice("Azure", "scheduled event Preempt", None, True)
        assert mock.asked == [EVENTS, NAME, EVENTS]

    @pytest.mark.parametrize("answer", [reply("x", 500), reply(""), silence])
    def test_unknown_name(self, answer: Answer, mock: Mock) -> None:
        """While this machine's name is unknown, all events count, and the notice says so."""
        mock.answers[NAME] = [answer, reply("vm_0")]
        mock.answers[EVENTS] = [events(event(names=["vm_1", "vm_2"]))]
        azure = AzureNotices(mock.base_url, 1)
        notice = azure.poll()
        assert notice is not None
        assert notice.is_final
        assert "Preempt of vm_1, vm_2 (this machine's own name is unknown)" in notice.announced
        assert azure.poll() is None

    def test_most_urgent(self, azure: AzureNotices, mock: Mock) -> None:
        """The most urgent event is reported: final before others, then started, then soon."""
        early, late = "Mon, 18 Sep 2017 08:22:00 GMT", "Mon, 18 Sep 2017 09:00:00 GMT"
        listed = [
            event("Freeze"),
            event("Reboot", late),
            event("Redeploy", early),
            event("Terminate"),
        ]
        reported = []
        while listed:
            mock.answers[EVENTS] = [events(*listed)]
            notice = azure.poll()
            assert notice is not None
            reported.append(notice.announced.split()[-1])
            listed = [each for each in listed if each["EventType"] != reported[-1]]  # type: ignore[index]
        assert reported == ["Terminate", "Redeploy", "Reboot", "Freeze"]

    def test_first_request(self, mock: Mock) -> None:
        """The long timeout applies until the first answer, the short one afterwards."""
        mock.answers[EVENTS] = [silence, events(), silence]
        azure = AzureNotices(mock.base_url, timeout_s=0.2, first_timeout_s=1)
        with pytest.raises(MetadataError, match="within 1 s"):
            azure.poll()
        assert azure.poll() is None
        with pytest.raises(MetadataError, match=r"within 0\.2 s"):
            azure.poll()

    @pytest.mark.parametrize(
        "answer",
        [
            reply("x", 500),
            reply("", 400),
            reply("<html>"),
            reply("{}"),
            reply('{"Events": {}}'),
            events("Preempt"),
            events({"EventType": "Preempt"}),
            events(event(kind=None)),
            events(event(names="vm_0")),
        ],
    )
    def test_garbage(self, answer: Answer, azure: AzureNotices, mock: Mock) -> None:
        mock.answers[EVENTS] = [answer]
        with pytest.raises(MetadataError, match=r"scheduledevents.*: expected "):
            azure.poll()


@pytest.mark.parametrize("make", [AwsNotices, GceNotices, AzureNotices])
def test_timeout(make: Callable[..., AwsNotices | GceNotices | AzureNotices], mock: Mock) -> None:
    """Every cloud uses the requested timeout."""
    for place in (TOKEN, PREEMPTED, EVENTS):
        mock.answers[place] = [silence]
    timeouts = {"first_timeout_s": 0.2} if make is AzureNotices else {"timeout_s": 0.2}
    with pytest.raises(MetadataError, match=r"within 0\.2 s"):
        make(mock.base_url, **timeouts).poll()
    assert mock.is_asked.wait(20)
    assert len(mock.asked) == 1


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({}, None),
        ({"sys_vendor": "Amazon EC2", "board_asset_tag": "i-0af01c0123456789a"}, "AWS"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "AWS"),
        ({"sys_vendor": "Xen", "bios_version": "4.11"}, None),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "GCE"),
        ({"sys_vendor": "Google", "product_name": "Eve"}, None),
        (
            {
                "sys_vendor": "Microsoft Corporation",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77",
            },
            "Azure",
        ),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),
        ({"sys_vendor": "\xff\xfe", "product_name": ""}, None),
    ],
)
def test_detect(files: dict[str, str], cloud: str | None, tmp_path: Path) -> None:
    """The firmware identifies the cloud; a Google laptop and plain Hyper-V do not count."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(f"{content}\n".encode("latin1"))
    (tmp_path / "product_serial").mkdir()
    assert detect(tmp_path) == cloud


def test_detect_without_firmware(tmp_path: Path) -> None:
    """Without a readable file, no cloud is detected."""
    assert detect(tmp_path / "nowhere") is None
    (tmp_path / "sys_vendor").mkdir()
    assert detect(tmp_path) is None


def test_poller() -> None:
    """Every cloud has its own poller."""
    clouds: list[Cloud] = ["AWS", "GCE", "Azure"]
    kinds = {cloud: type(poller(cloud).__self__) for cloud in clouds}  # type: ignore[attr-defined]
    assert kinds == {"AWS": AwsNotices, "GCE": GceNotices, "Azure": AzureNotices}
