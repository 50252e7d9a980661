"""Every sound record of a file is found, whatever happened to its neighbours, and every lost one is counted."""

import gzip
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ctl.data import streams
from ctl.data.scan import scan
from ctl.errors import UserError
from tests.bert_records import COMPRESS


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    return tmp_path_factory.mktemp('scan') / 'file'


def frames_of(payloads, path):
    """Each record as the bytes that TensorFlow writes for it."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for payload in payloads:
            writer.write(payload)
    data, frames = path.read_bytes(), []
    for payload in payloads:
        size = len(payload) + streams.FRAME_BYTES
        frames.append(bytearray(data[:size]))
        data = data[size:]
    return frames


def read_back(path, content):
    """The payloads that an index of the file would read, by where the scan says they are."""
    stream = streams.open_stream(str(path), content.compression)
    place, number, found, gaps = 0, 0, {}, {damage.number: damage for damage in content.damaged}
    for size in content.sizes.tolist():
        while number in gaps:
            assert gaps[number].start == place
            place, number = place + gaps[number].size, number + 1
        found[number] = stream.read(place + streams.HEADER_BYTES, place + size - 4)
        place, number = place + size, number + 1
    stream.close()
    return found


payloads = st.lists(st.binary(max_size=60), min_size=2, max_size=12)


@given(payloads, st.data(), st.sampled_from(['', 'GZIP', 'ZLIB']))
@settings(max_examples=60)
def test_only_damaged_records_are_lost_whichever_they_are(path, payloads, data, compression):
    frames = frames_of(payloads, path)
    hurt = data.draw(st.lists(st.integers(0, len(frames) - 1), unique=True, max_size=len(frames) - 1))
    for i in hurt:
        frames[i][data.draw(st.integers(0, len(frames[i]) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(COMPRESS[compression](b''.join(frames)))
    content = scan(str(path), lambda size: None)
    sound = [i for i in range(len(frames)) if i not in hurt]
    # Neighbours whose lengths are both damaged are one span, for nothing says where the first ends.
    assert list(read_back(path, content).values()) == [payloads[i] for i in sound]
    assert len(content.damaged) <= len(hurt)
    assert not hurt or content.damaged
    assert content.compression == compression


@given(payloads, st.data())
@settings(max_examples=30)
def test_damaged_payloads_are_counted_one_by_one_with_their_numbers(path, payloads, data):
    frames = frames_of(payloads, path)
    hurt = data.draw(st.lists(st.integers(0, len(frames) - 1), unique=True, max_size=len(frames) - 1))
    for i in hurt:
        frames[i][-1] ^= 1
    path.write_bytes(b''.join(frames))
    content = scan(str(path), lambda size: None)
    assert [damage.number for damage in content.damaged] == sorted(hurt)
    assert read_back(path, content) == {i: payload for i, payload in enumerate(payloads) if i not in hurt}


@given(payloads, st.data())
@settings(max_examples=30)
def test_a_file_cut_anywhere_loses_one_record(path, payloads, data):  # C25
    frames = frames_of(payloads, path)
    whole = b''.join(frames)
    cut = data.draw(st.integers(len(frames[0]) + 1, len(whole) - 1))
    path.write_bytes(whole[:cut])
    content = scan(str(path), lambda size: None)
    ends = np.cumsum([len(frame) for frame in frames])
    sound = int(np.sum(ends <= cut))
    assert len(content.sizes) == sound
    at_an_end = cut in ends
    assert [d.problem for d in content.damaged] == ([] if at_an_end else ['is cut off'])


@given(payloads, payloads, st.integers(0, 75))
@example([b'', bytes(4)], [bytes(4), b''], 10)  # the cut header and one byte of the next are a header too
@settings(max_examples=30)
def test_what_a_second_writer_appended_to_a_cut_file_is_found(path, first, second, where):
    frames = frames_of(first, path)
    whole, more = b''.join(frames[:-1]), frames_of(second, path)
    cut = 1 + where % (len(frames[-1]) - 1)
    # Where one of the second writer's records ends just where the cut one was to end, it looks like a wrong checksum.
    assume(len(frames[-1]) - cut not in np.cumsum([len(frame) for frame in more]))
    path.write_bytes(whole + frames[-1][:cut] + b''.join(more))
    content = scan(str(path), lambda size: None)
    assert list(read_back(path, content).values()) == [*first[:-1], *second]
    assert len(content.damaged) == 1


@pytest.mark.parametrize('compression', ['GZIP', 'ZLIB'])
def test_a_compressed_file_that_is_cut_keeps_what_comes_before(path, compression):
    payloads = [np.random.default_rng(i).bytes(5000) for i in range(50)]
    data = COMPRESS[compression](b''.join(frames_of(payloads, path)))
    path.write_bytes(data[: len(data) // 2])
    content = scan(str(path), lambda size: None)
    assert 20 <= len(content.sizes) <= 25
    assert 'a compressed file cannot be read beyond' in content.damaged[0].problem
    path.write_bytes(data[:-2])  # all records are there, but nothing vouches for them
    assert len(scan(str(path), lambda size: None).damaged) == 1


def test_gzip_files_joined_end_to_end_are_one(path):
    frames = frames_of([b'a', b'b', b'c'], path)
    path.write_bytes(gzip.compress(frames[0]) + gzip.compress(frames[1] + frames[2]))
    assert len(scan(str(path), lambda size: None).sizes) == 3


def test_a_plain_file_that_begins_as_zlib_does_is_plain(path):
    """Its first record has 40,056 bytes: 0x9c78, and zlib files begin with 0x78 0x9c."""
    frames = frames_of([bytes(40056), b'more'], path)
    path.write_bytes(b''.join(frames))
    assert path.read_bytes()[:2] == b'\x78\x9c'
    content = scan(str(path), lambda size: None)
    assert content.compression == '' and len(content.sizes) == 2


@pytest.mark.parametrize(
    'data, said',
    [
        (b'<!DOCTYPE html>\r\n<html>404</html>', "it is text, which begins with '<!DOCTYPE html> <html>404</html>'"),
        (bytes(100_000), 'Is it a TFRecord file'),
        (gzip.compress(b'text' * 100), 'compressed with gzip it is text'),
        (b'PAR1' + bytes(range(256)) * 4000, 'it is a Parquet file'),
        (b'\xff\xd8\xff\xe0' + bytes(100), 'it is a JPEG image, and no TFRecord file: make TFRecords of it'),
        (b'version https://git-lfs.github.com/spec/v1\n', 'git lfs pull'),
    ],
    ids=['text', 'zeros', 'compressed text', 'parquet', 'image', 'pointer'],
)
def test_a_file_that_holds_no_records_is_refused(path, data, said):
    path.write_bytes(data)
    with pytest.raises(UserError, match=f'file: .*{re.escape(said)}'):
        scan(str(path), lambda size: None)


def test_a_damaged_first_record_whose_length_looks_like_another_file_is_a_damaged_record(path):
    """35,615 bytes: the length begins with the two bytes of gzip."""
    frames = frames_of([bytes(0x8B1F), b'more'], path)
    path.write_bytes(frames[0][:-1] + bytes([frames[0][-1] ^ 1]) + frames[1])
    content = scan(str(path), lambda size: None)
    assert len(content.damaged) == 1 and len(content.sizes) == 1


def test_a_file_that_a_crash_has_filled_with_zeros_is_searched_fast_and_says_how_far_it_is(path):
    frames = frames_of([b'first', b'last'], path)
    with open(path, 'wb') as file:
        file.write(frames[0])
        file.truncate(1 << 30)
        file.seek(0, 2)
        file.write(frames[1])
    done = []
    content = scan(str(path), done.append)
    assert len(content.sizes) == 2 and len(content.damaged) == 1
    assert len(done) > 100 and sum(done) == path.stat().st_size


def test_an_empty_gzip_file_is_refused(path):
    path.write_bytes(gzip.compress(b''))
    with pytest.raises(UserError, match='it holds no records'):
        scan(str(path), lambda size: None)


def test_a_compressed_file_is_read_from_any_place_to_any_other(path):
    data = np.random.default_rng(0).bytes(3_000_000)
    path.write_bytes(gzip.compress(data, 1))
    stream = streams.open_stream(str(path), 'GZIP')
    for start, end in [(0, 10), (5, 20), (2_500_000, 2_600_000), (7, 1_500_000), (2_999_990, 3_000_100), (9, 9)]:
        assert stream.read(start, end) == data[start:end]
    assert not stream.broken


def test_two_scans_agree_on_the_fingerprint_and_another_record_changes_it(path):
    def fingerprint(payloads, compression=''):
        path.write_bytes(COMPRESS[compression](b''.join(frames_of(payloads, path))))
        return scan(str(pathlib.Path(path)), lambda size: None).fingerprint

    assert fingerprint([b'one', b'two']) == fingerprint([b'one', b'two'], 'GZIP')
    assert fingerprint([b'one', b'two']) != fingerprint([b'two', b'one'])
    assert fingerprint([b'one', b'two']) != fingerprint([b'one', b'twO'])
