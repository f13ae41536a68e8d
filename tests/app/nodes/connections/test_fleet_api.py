"""What is asked of a SuperLink without a node's session."""

import httpx
import pytest
from murmurfl.app.nodes.diagnosis import FleetApi, passing_key


@pytest.mark.parametrize(("answer", "takes"), [(200, True), (401, False), (403, False), (404, False), (None, False)])
def test_a_server_takes_commands_where_it_lists_its_runs_for_anybody(answer, takes):
    """None hangs up, as a proxy may: the SuperLink behind it was reached all the same."""

    def answered(request):
        assert request.url.path == "/v1/control/list-runs"
        if answer is None:
            raise httpx.RemoteProtocolError("hung up", request=request)
        return httpx.Response(answer)

    client = httpx.Client(transport=httpx.MockTransport(answered))
    assert FleetApi(client, "https://fl.example.org:8000", passing_key()).takes_commands() is takes
