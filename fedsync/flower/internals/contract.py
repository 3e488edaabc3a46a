"""What FedSync goes by in Flower's private parts, and what of it is another in the flwr that is installed.

Each point is a function, class or constant, by module and name, with fingerprints of its source: of a Protobuf message,
those of its fields. Where none fits, somebody has to read what changed, and what this folder makes of it. A test finds
points that are used and not listed here. Usage, after another flwr was installed::

    python -m fedsync.flower.internals.contract

It names what changed, and prints fingerprints to be added here once that was read and all tests pass.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from importlib.metadata import version
from typing import Any

from fedsync.observe.terminal import say

_DIGITS = 12
_GONE = "is not there"
_OTHER = "is another"

Points = Mapping[str, Mapping[str, frozenset[str]]]


def _points(text: str) -> Mapping[str, frozenset[str]]:
    """Of a line a point: its place, then fingerprints."""
    found = (line.split() for line in text.strip().splitlines())
    return {place: frozenset(prints) for place, *prints in found}


POINTS: Points = {
    "a SuperNode's pauses between looks": _points("""
        flwr.supernode.start_client_internal:start_client_internal 9e89a6eb68fb
        flwr.supercore.inflatable.inflatable_utils:pull_objects 31bb2de46b45
        flwr.supercore.inflatable.inflatable_utils:pull_and_inflate_object_from_tree 139811483a15
    """),
    "messages answered in the SuperNode's process": _points("""
        flwr.supernode.start_client_internal:_pull_and_store_message eaf5d0e36dc3
        flwr.supernode.start_client_internal:_push_messages 00bb86faffde
        flwr.supernode.cli.flower_supernode:flower_supernode e263e1045207
        flwr.supernode.cli.flower_supernode:_start_supernode_http_api b2832210a0ca
        flwr.supernode.nodestate:NodeState.get_messages_legacy ee65612501be
        flwr.supernode.nodestate:NodeState.store_message da6f3caccb4b
        flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState.create_task ca22dc66c899
        flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState.finish_task 6800803a9677
        flwr.supercore.corestate.in_memory_corestate:InMemoryCoreState.finish_task 74802c12902f
        flwr.supernode.nodestate:NodeState.record_message_processing_start 0388c0952ed4
        flwr.supernode.nodestate:NodeState.record_message_processing_end 89b34f71f940
        flwr.supernode.nodestate:NodeState.get_run 6af7b6017411
        flwr.supernode.nodestate:NodeState.get_fab ff35a8c0d74e
        flwr.supernode.nodestate:NodeState.get_run_series_context 9689bd9529a6
        flwr.supercore.object_store:ObjectStore.preregister f86c132a4823
        flwr.supercore.object_store:ObjectStore.put cc060808321f
        flwr.supercore.object_store:ObjectStore.get 51f2355e2d38
        flwr.supercore.object_store:ObjectStore.delete 08271e640d3c
        flwr.supercore.object_store:ObjectStore.get_object_tree ee7155bee4d4
        flwr.supercore.inflatable.inflatable_object:get_all_nested_objects 409d9822fd87
        flwr.supercore.inflatable.inflatable_object:get_object_tree d247ce6d76fd
        flwr.supercore.inflatable.inflatable_object:iterate_object_tree 34c0fe845619
        flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents 93b98a2ea3f3
        flwr.supercore.run:Run 2f1566491e6b
        flwr.supercore.fab:Fab 140aff940cdb
        flwr.common.config:get_fab_config 99a9a8004cd3
    """),
    "held requests and messages with their parts": _points("""
        flwr.supernode.fleet_http_connection:FleetHttpClient.from_server_address 786f4a7b7492
        flwr.supernode.fleet_http_connection:NodeAuthHttpInterceptor a032beb3c41b
        flwr.server.superlink.linkstate:LinkState.store_message_and_object_tree aca9eca3522b
        flwr.server.superlink.linkstate:LinkState.get_task_by_token fed090bf3698
        flwr.superlink.servicer.fleet.fleet_handlers:pull_messages 5f1d8861a9eb
        flwr.superlink.servicer.fleet.fleet_handlers:pull_object 78f6d45fda46
        flwr.superlink.servicer.fleet.fleet_handlers:push_messages 70c2fe927c66
        flwr.superlink.servicer.fleet.fleet_handlers:push_object df7e96f1188e
        flwr.superlink.servicer.fleet.fleet_handlers:confirm_message_received 52bf47754a45
        flwr.superlink.servicer.runtime.runtime_handlers:pull_messages 8c998d6d197c
        flwr.superlink.servicer.runtime.runtime_handlers:pull_object 9fad81e6c59e
        flwr.superlink.servicer.runtime.runtime_handlers:push_messages 03b2ea647465
        flwr.superlink.servicer.runtime.runtime_handlers:push_object b2f9c8ea398e
        flwr.superlink.servicer.runtime.runtime_handlers:confirm_message_received ff4736642191
        flwr.superlink.grid.http_grid:HttpGrid._try_push_messages 6e420bc3237c
        flwr.proto.fleet_pb2:PullMessagesRequest 9624771a641c
        flwr.proto.fleet_pb2:PullMessagesResponse 6efa644f28f0
        flwr.proto.fleet_pb2:PushMessagesRequest 70d1a9299f33
        flwr.proto.fleet_pb2:PushMessagesResponse b1635ae10d2d
        flwr.proto.runtime_pb2:PullAppMessagesRequest d6e65bc3e2b9
        flwr.proto.runtime_pb2:PullAppMessagesResponse 789498123544
        flwr.proto.runtime_pb2:PushAppMessagesRequest 27295354f5df
        flwr.proto.runtime_pb2:PushAppMessagesResponse c4e0093ac9d4
        flwr.proto.message_pb2:Message a8d273270d24
        flwr.proto.message_pb2:Metadata 13db3db946c6
        flwr.proto.message_pb2:ObjectTree 5c491f087d21
        flwr.proto.message_pb2:PullObjectRequest 67ac4795e42e
        flwr.proto.message_pb2:PullObjectResponse 3ec230849b28
        flwr.proto.message_pb2:PushObjectRequest 29d203de06a5
        flwr.proto.message_pb2:PushObjectResponse c362d9dbf908
        flwr.proto.message_pb2:ConfirmMessageReceivedRequest 745158db50be
        flwr.proto.message_pb2:ConfirmMessageReceivedResponse 4f53cda18c2b
        flwr.proto.node_pb2:Node 190999e45c6a
    """),
    "answers fetched apart": _points("""
        flwr.superlink.grid.http_grid:HttpGrid.pull_messages 67a5266a5a2e
        flwr.supercore.inflatable.inflatable_protobuf_utils:make_pull_object_fn_protobuf ede05e6314fa
        flwr.supercore.inflatable.inflatable_utils:ObjectPullError 58868c9b8bee
        flwr.supercore.inflatable.inflatable_object:get_object_body 221a88d53513
        flwr.supercore.inflatable.inflatable_object:get_object_head_values_from_object_content d9288c47e775
    """),
    "what runs leave in a database": _points("""
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.create_run 37e430ddba6b 44f677818ba5
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_run_info b6686f297300
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_message_ids_from_run_id 70ae4f9f56bb
        flwr.server.superlink.linkstate.linkstate:LinkState.cleanup_run c4ca8a76bcb4
        flwr.supercore.corestate.sql_corestate:SqlCoreState.add_task_log 93feca0deab3
        flwr.supercore.state.schema.corestate_models:TaskLogsTable a85f8504acb5
    """),
    "heartbeats that are heard, not written": _points("""
        flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL 624b60c58c9d
        flwr.common.constant:HEARTBEAT_PATIENCE d4735e3a265e
        flwr.proto.heartbeat_pb2:SendNodeHeartbeatRequest 8641d8a570fc
        flwr.proto.heartbeat_pb2:SendNodeHeartbeatResponse 924b488ea744
        flwr.superlink.servicer.fleet.fleet_handlers:send_node_heartbeat d56e73950a3f
        flwr.supercore.state.schema.linkstate_models:Node d2ff0a5c23dd
        flwr.supercore.utils:uint64_to_int64 25954f49d88d
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.acknowledge_node_heartbeat 922e5841c816
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.activate_node a06be1bac7e1
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.deactivate_node c3ad2ab2beb4
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_nodes 5bfc5eda7780
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_node_info c5c7a1d033d3
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_message_res 5c1b460981b4
    """),
    "what nodes ask of runs": _points("""
        flwr.superlink.servicer.fleet.fleet_handlers:get_run 004ad390c8b3
        flwr.superlink.servicer.fleet.fleet_handlers:get_fab 8778f0626c77
        flwr.superlink.servicer.fleet.fleet_handlers:_validate_node_in_federation 2b3013bdb50e
        flwr.supercore.corestate.sql_corestate:SqlCoreState.get_fab 26dbb4b729fc
        flwr.proto.run_pb2:GetRunRequest 9503cadba3f1
        flwr.proto.run_pb2:GetRunResponse 099e75395d1a
        flwr.proto.fab_pb2:GetFabRequest bcef12b68587
        flwr.proto.fab_pb2:GetFabResponse 6341785d9b49
    """),
    "bundles in one transaction": _points("""
        flwr.supercore.sql_mixin:SqlMixin.session 2aa8a8351f33
        flwr.supercore.run:RunStatus 6fbedd301086
        flwr.common.constant:Status 0fab62895910
        flwr.server.superlink.utils:check_abort 4990608beb17
        flwr.server.utils.validator:validate_message c3328f0cf0b7
        flwr.server.superlink.linkstate.utils:message_to_dict 7eaadf9d31c1
        flwr.server.superlink.linkstate.utils:convert_uint64_values_in_dict_to_sint64 3a243ef1db6e
        flwr.server.superlink.linkstate.utils:convert_sint64_values_in_dict_to_uint64 a4d9bd4e31f1
        flwr.server.superlink.linkstate.utils:dict_to_message 393b72e7c715
        flwr.server.superlink.linkstate.utils:verify_message_ids e8e4fa71d889
        flwr.server.superlink.linkstate.utils:verify_found_message_replies aa9cc7c28965
        flwr.server.superlink.linkstate.utils:check_node_availability_for_in_message 7da2db99a202
        flwr.common.constant:MESSAGE_TTL_TOLERANCE 14be4b45f18e
        flwr.supercore.sql_mixin:SqlMixin.initialize 010e6d94a7ba
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_run_status 9f5531faa145
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.store_traffic cc82e5eaf2bb
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.add_clientapp_runtime 5e7961fe7305
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.store_message_and_object_tree 1fd5d65c086f
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.store_message_ins 03ff7e13cf98
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.store_message_res 0d5ff7f4f292
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_message_ins 4299efc545e6
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.get_valid_message_ins 59abe5660f99
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState._lock_run 6b5866bba842
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState._claim_message_ins_rows cd74f93ce469
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState._load_message_ins_rows 18748b2fdbcc
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState._check_stored_messages e4aa2d05a99a
        flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.delete_messages d4e4907ef5ac
        flwr.server.superlink.linkstate.sql_linkstate:_run_status_from_task_model 856afb7204f6
        flwr.server.superlink.linkstate.sql_linkstate:_message_model_to_dict 379c49e10547
        flwr.supercore.corestate.sql_corestate:SqlCoreState.start_session 1921ed72bdf8
        flwr.supercore.corestate.sql_corestate:SqlCoreState.preregister_object_tree e8627c45d229
        flwr.supercore.corestate.sql_corestate:SqlCoreState.store_object 903590e22681
        flwr.supercore.corestate.sql_corestate:SqlCoreState.get_object 6fca12d9ec58
        flwr.supercore.corestate.sql_corestate:SqlCoreState._cleanup_push_session 6e84f952c16a
        flwr.supercore.corestate.sql_corestate:SqlCoreState._cleanup_expired_task_tokens 34301eae2ee4
        flwr.supercore.object_store:NoObjectInStoreError dd414d00e383
        flwr.supercore.object_store.sql_object_store:SqlObjectStore.preregister b1a91327f784
        flwr.supercore.object_store.sql_object_store:SqlObjectStore.get_object_tree 9774341d09cd
        flwr.supercore.object_store.sql_object_store:SqlObjectStore.put 399bbf08368d
        flwr.supercore.object_store.sql_object_store:SqlObjectStore.get bf5844fab44c
        flwr.supercore.object_store.sql_object_store:SqlObjectStore.delete ac6c8a3fdb63
        flwr.supercore.state.schema.objectstore_models:StoredObject a8b196ab94ad
        flwr.supercore.state.schema.objectstore_models:ObjectChild 32b78bd579e3
        flwr.supercore.state.schema.objectstore_models:RunObject 923078b8b822
        flwr.supercore.state.schema.corestate_models:ObjectPushSession 803b8ceca9ec
        flwr.supercore.state.schema.corestate_models:ObjectPushSessionRoot 84742c8458dc
        flwr.supercore.state.schema.corestate_models:Task 47299c112d4c
        flwr.supercore.state.schema.linkstate_models:Run 1292966651a6
        flwr.supercore.state.schema.linkstate_models:MessageIns 18b05953608d
        flwr.supercore.state.schema.linkstate_models:MessageRes f6104cc7510c
        flwr.supercore.inflatable.inflatable_object:get_object_id 1c9d6716beb1
        flwr.supercore.inflatable.inflatable_utils:validate_object_content 86b85558c2b3
        flwr.supercore.utils:int64_to_uint64 942d251dd5cb
    """),
    "the gate before the SuperLink": _points("""
        flwr.superlink.main:create_app ee966b630c8b
        flwr.superlink.cli.flower_superlink:flower_superlink 398ce9c85755
        flwr.superlink.routers.fleet.node_auth:verify_signature d13a709b0710
        flwr.supercore.primitives.asymmetric:verify_signature d13a709b0710
        flwr.supercore.primitives.asymmetric:bytes_to_public_key de83bfa0fba7
        flwr.supercore.auth:compute_superexec_signature 2fb1e79f6602
        flwr.supercore.auth:derive_auth_secret 75e140f34656
        flwr.supercore.constant:NodeStatus 579b918c601f
        flwr.supercore.date:now 31ee299367ea
        flwr.supercore.error:FlowerError 5791034e4609
        flwr.common.constant:SYSTEM_TIME_TOLERANCE ef2d127de37b
        flwr.common.constant:TIMESTAMP_TOLERANCE 983bd614bb5a
        flwr.common.constant:SUPERLINK_NODE_ID 6b86b273ff34
        flwr.server.superlink.linkstate:LinkState.get_node_info 62f0390af9b9
    """),
    "the server's apps and operators": _points("""
        flwr.supercore.cli.flower_superexec:flower_superexec f0e2725c92a5
        flwr.supercore.superexec.executor.subprocess_executor:subprocess f77b7310faf3
        flwr.supercore.control:ControlHttpClient.from_server_address 786f4a7b7492
        flwr.cli.cli_client_interceptor:CliClientHttpInterceptor 3bacb42f738c
        flwr.supercore.interceptors:RuntimeVersionHttpInterceptor 32dc4f3d763a
        flwr.supercore.protobuf.client:ProtobufCall a47eacc5f8c4
        flwr.supercore.protobuf.client:ProtobufRequestContext ac89e51d64bb
        flwr.supercore.primitives.asymmetric:public_key_to_bytes 552b787ae343
        flwr.proto.control_pb2:ListNodesRequest 4f53cda18c2b
        flwr.proto.control_pb2:RegisterNodeRequest 0d28db41b3f8
        flwr.proto.control_pb2:UnregisterNodeRequest 190999e45c6a
        flwr.proto.node_pb2:NodeInfo 69be4063286a
        flwr.common.constant:APP_DIR fd8b77bf8244
        flwr.supercore.utils:get_flwr_home 976b70dd0d24
    """),
}
"""By what FedSync does with them: points ``module:name``, each with fingerprints that were read and tested."""


@dataclass(frozen=True, slots=True)
class Change:
    """A point that is not as it was.

    Args:
        place: ``module:name``.
        serves: what of FedSync goes by it.
        problem: what is wrong with it.
        print: its fingerprint now; empty where it is not there.
    """

    place: str
    serves: str
    problem: str
    print: str = ""

    def __str__(self) -> str:
        return f"{self.place} {self.problem} ({self.serves})"


def changes(points: Points = POINTS) -> list[Change]:
    """What is another in the flwr that is installed, or gone; imports much of it."""
    found = []
    for serves, places in points.items():
        for place, known in places.items():
            try:
                now = fingerprint(place)
            except (ImportError, AttributeError):
                found.append(Change(place, serves, _GONE))
                continue
            if now not in known:
                found.append(Change(place, serves, _OTHER, now))
    return found


def fingerprint(place: str) -> str:
    """Twelve hexadecimal digits that change with a point's source, fields or value.

    Raises:
        ImportError: its module is not there.
        AttributeError: it is not there.
    """
    module, _, name = place.partition(":")
    start: Any = import_module(module)
    return hashlib.sha256(_text(reduce(getattr, name.split("."), start)).encode()).hexdigest()[:_DIGITS]


def _text(found: Any) -> str:
    descriptor = getattr(found, "DESCRIPTOR", None)
    if descriptor is not None:
        return repr([(field.number, field.name, field.type, field.label) for field in descriptor.fields])
    if inspect.ismodule(found):
        return found.__name__
    return inspect.getsource(found) if inspect.isclass(found) or inspect.isroutine(found) else repr(found)


def main() -> None:
    """Print what changed."""
    found = changes()
    say(f"flwr {version('flwr')}: {sum(map(len, POINTS.values()))} points, {len(found)} of them changed")
    for change in found:
        say(f"{change}: {change.print}")


if __name__ == "__main__":
    main()
