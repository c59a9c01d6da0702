"""The generated gRPC code is what the protos give."""

import shutil

from headrace.proto import generate


def test_the_generated_code_is_up_to_date():
    assert generate.out_of_date() == []


def test_a_changed_proto_and_a_file_without_a_proto_are_found(tmp_path):
    folder = tmp_path / "headrace" / "proto"
    shutil.copytree(generate.ROOT / "headrace" / "proto", folder)
    proto = folder / "role.proto"
    proto.write_text(proto.read_text() + "\nmessage More {}\n")
    (folder / "gone_pb2.py").write_text("")
    assert generate.out_of_date(tmp_path) == [
        "headrace/proto/gone_pb2.py",
        "headrace/proto/role_pb2.py",
        "headrace/proto/role_pb2.pyi",
    ]
