"""Atomic writing of files: attributes of a replaced file, special files, and failed writes"""
import errno
import multiprocessing
import os
import stat
import tempfile
import threading
from pathlib import Path
from typing import Callable, List

import mmengine
import pytest
import torch
from safetensors.torch import load_file, save_file

import mmseg_plugin  # noqa: F401  (registers its file backend)
from timm_gated.utils.files import new_file


def write(content: bytes, path: Path) -> None:
    with new_file(path) as partial:
        partial.write_bytes(content)


def put(content: bytes, path: Path) -> None:
    mmengine.fileio.put(content, path, backend_args=dict(backend='timm_gated_local'))


def put_text(content: bytes, path: Path) -> None:
    mmengine.fileio.put_text(content.decode(), path, backend_args=dict(backend='timm_gated_local'))


every_way = pytest.mark.parametrize('write', [write, put, put_text])


def names(folder: Path) -> List[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def umask():
    """Sets the umask until the end of the test."""
    previous = os.umask(0o022)
    yield os.umask
    os.umask(previous)


@every_way
@pytest.mark.parametrize('mode', [0o600, 0o640, 0o644, 0o200, 0o664, 0o777])
def test_a_rewritten_file_keeps_its_mode(write, mode, tmp_path, umask):
    umask(0o022)
    path = tmp_path / 'file'
    path.write_bytes(b'before')
    path.chmod(mode)
    write(b'after', path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    path.chmod(0o600)
    assert path.read_bytes() == b'after' and names(tmp_path) == ['file']


@every_way
@pytest.mark.parametrize('mask', [0o022, 0o077, 0o002])
def test_a_new_file_gets_the_mode_of_the_umask(write, mask, tmp_path, umask):
    umask(mask)
    write(b'content', tmp_path / 'file')
    assert stat.S_IMODE((tmp_path / 'file').stat().st_mode) == 0o666 & ~mask


def test_writers_that_choose_a_mode_themselves(tmp_path, umask):
    """safetensors creates files with a mode of its own."""
    umask(0o022)
    path = tmp_path / 'file.safetensors'
    for mode in (0o644, 0o640):
        with new_file(path) as partial:
            save_file({'x': torch.ones(2)}, partial)
        assert stat.S_IMODE(path.stat().st_mode) == mode and load_file(path)['x'].sum() == 2
        path.chmod(0o640)


@every_way
def test_a_pipe_is_written_to(write, tmp_path):
    pipe, read = tmp_path / 'pipe', []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(b'content', pipe)
    reader.join(timeout=60)
    assert read == [b'content'] and pipe.is_fifo() and names(tmp_path) == ['pipe']


@every_way
def test_a_device_is_written_to(write, tmp_path):
    device = tmp_path / 'null'
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b'x')
    except PermissionError:
        pytest.skip('this user may not make devices')
    write(b'content', device)
    assert device.is_char_device() and device.read_bytes() == b'' and names(tmp_path) == ['null']


@every_way
def test_an_open_pipe_is_written_to(write):
    """For example /dev/stdout in `tool --output /dev/stdout | less`."""
    reader, writer = os.pipe()
    write(b'content', Path(f'/dev/fd/{writer}'))
    os.close(writer)
    with open(reader, 'rb') as pipe:
        assert pipe.read() == b'content'


@every_way
def test_an_open_file_without_a_name_is_written_to(write):
    with tempfile.TemporaryFile() as file:
        write(b'content', Path(f'/dev/fd/{file.fileno()}'))
        assert file.read() == b'content'


@every_way
def test_links_are_followed(write, tmp_path):
    folder = tmp_path / 'folder'
    folder.mkdir()
    (folder / 'file').write_bytes(b'before')
    for link, target in (('link', 'folder/file'), ('of_a_link', 'link'), ('to_nothing', 'folder/new')):
        (tmp_path / link).symlink_to(target)
        write(link.encode(), tmp_path / link)
        assert (tmp_path / link).is_symlink() and (tmp_path / link).read_bytes() == link.encode()
    assert names(folder) == ['file', 'new'] and (folder / 'file').read_bytes() == b'of_a_link'


@every_way
def test_hard_links_stay(write, tmp_path):
    path, other = tmp_path / 'file', tmp_path / 'other'
    path.write_bytes(b'a longer text from before')
    os.link(path, other)
    write(b'after', path)
    assert path.samefile(other) and other.read_bytes() == b'after' and names(tmp_path) == ['file', 'other']


@every_way
def test_files_of_another_owner_stay_so(write, tmp_path):
    path = tmp_path / 'file'
    path.write_bytes(b'before')
    try:
        os.chown(path, 12345, 12346)
    except PermissionError:
        pytest.skip('this user may not give files away')
    write(b'after', path)
    assert (path.stat().st_uid, path.stat().st_gid, path.read_bytes()) == (12345, 12346, b'after')


@every_way
def test_extended_attributes_stay(write, tmp_path):
    path = tmp_path / 'file'
    path.write_bytes(b'before')
    os.utime(path, (0, 0))
    try:
        os.setxattr(path, 'user.origin', b'here')
    except OSError:
        pytest.skip('this file system has none')
    write(b'after', path)
    assert os.getxattr(path, 'user.origin') == b'here' and path.read_bytes() == b'after' and path.stat().st_mtime > 0


def write_as_another(write: Callable[[bytes, Path], None], path: Path) -> None:
    if os.geteuid() == 0:  # root may write everywhere
        os.setgid(12345)
        os.setuid(12345)
    try:
        write(b'after', path)
    except PermissionError:
        os._exit(13)
    os._exit(0)


@every_way
@pytest.mark.parametrize('mode, folder_mode, code, content', [
    (0o644, 0o555, 0, b'after'), (0o444, 0o755, 13, b'before'), (0o444, 0o555, 13, b'before')])
def test_what_is_closed_to_writing(write, mode, folder_mode, code, content):
    """As with `open`, a file in a read-only folder is written, a read-only file is not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'file'
        path.write_bytes(b'before')
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
            os.chown(folder, 12345, 12345)
        path.chmod(mode)
        os.chmod(folder, folder_mode)
        process = multiprocessing.get_context('fork').Process(target=write_as_another, args=(write, path))
        process.start()
        process.join()
        os.chmod(folder, 0o755)
        assert process.exitcode == code and path.read_bytes() == content and names(Path(folder)) == ['file']
        assert stat.S_IMODE(path.stat().st_mode) == mode


@every_way
def test_a_mount_point_is_written_to(write, tmp_path, monkeypatch):
    path = tmp_path / 'file'
    path.write_bytes(b'a longer text from before')
    inode = path.stat().st_ino
    monkeypatch.setattr(os, 'replace', lambda *args: fail(errno.EBUSY, 'busy'))
    write(b'after', path)
    assert path.read_bytes() == b'after' and path.stat().st_ino == inode and names(tmp_path) == ['file']


@every_way
def test_a_loop_of_links_is_an_error_of_the_system(write, tmp_path):
    (tmp_path / 'loop').symlink_to('loop')
    with pytest.raises(OSError, match='symbolic links'):
        write(b'content', tmp_path / 'loop')
    assert (tmp_path / 'loop').is_symlink() and names(tmp_path) == ['loop']


@every_way
@pytest.mark.parametrize('name', ['x' * 250 + '.pth', 'x' * 255, 'x.' + 'y' * 252, '\u00e9' * 125 + '.pth', '.hidden'])
def test_names_of_any_length(write, name, tmp_path):
    for content in (b'before', b'after'):
        write(content, tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    assert names(tmp_path) == [name]


@pytest.mark.parametrize('path', ['file', 'new/folder/file'])
def test_folders_are_made_by_the_backend(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(b'content', path)
    assert Path(path).read_bytes() == b'content'


@every_way
def test_nothing_is_left_of_a_replacement_that_fails(write, tmp_path, monkeypatch):
    path = tmp_path / 'file'
    write(b'before', path)
    monkeypatch.setattr(os, 'replace', lambda *args: fail(errno.ENOSPC, 'disk full'))
    for target in (path, tmp_path / 'new'):
        with pytest.raises(OSError, match='disk full'):
            write(b'after', target)
    assert path.read_bytes() == b'before' and names(tmp_path) == ['file']


def fail(number: int, message: str) -> None:
    raise OSError(number, message)


@pytest.mark.parametrize('prepare', [Path.touch, os.mkfifo, lambda path: None], ids=['file', 'pipe', 'nothing'])
def test_nothing_is_left_of_a_write_that_fails(prepare, tmp_path):
    prepare(tmp_path / 'file')
    before = names(tmp_path)
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            with new_file(tmp_path / 'file') as partial:
                partial.write_bytes(b'a part')
                raise error
    assert names(tmp_path) == before


@every_way
def test_a_folder_is_refused(write, tmp_path):
    (tmp_path / 'folder').mkdir()
    with pytest.raises(IsADirectoryError):
        write(b'content', tmp_path / 'folder')
    assert names(tmp_path) == ['folder'] and not any((tmp_path / 'folder').iterdir())


def write_often(write: Callable[[bytes, Path], None], path: Path, letter: bytes) -> None:
    for _ in range(150):
        write(letter * 5000, path)


@pytest.mark.parametrize('write', [write, put])
def test_processes_that_write_one_path(write, tmp_path):
    path = tmp_path / 'file'
    write(b'-' * 5000, path)
    context = multiprocessing.get_context('fork')
    processes = [context.Process(target=write_often, args=(write, path, letter)) for letter in (b'a', b'b', b'c')]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        content = path.read_bytes()
        assert len(content) == 5000 and len(set(content)) == 1
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert path.read_bytes() in [letter * 5000 for letter in (b'a', b'b', b'c')] and names(tmp_path) == ['file']


def test_the_local_backend_of_mmengine_is_its_own():
    backend = mmengine.fileio.get_file_backend
    assert type(backend('x.pth')) is type(backend(backend_args=dict(backend='local'))) is mmengine.fileio.LocalBackend
