"""Chromium without a window, driven by chromedriver's WebDriver protocol"""
import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, List, Optional

__all__ = ['Browser']

_ELEMENT = 'element-6066-11e4-a52e-4f735466cecf'  # key of an element in WebDriver's JSON
_FLAGS = [
    '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
    '--disable-background-networking', '--disable-component-update', '--disable-sync', '--hide-scrollbars']


class Browser:
    """A browser with one page.

    Args:
        folder: New folder for the profile and the log.
        width: Width of the page; below 500 as on a phone.
        height: Height of the page.
    """

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        driver = shutil.which('chromedriver')
        if driver is None:
            raise RuntimeError('chromedriver is not installed: apt-get install chromium chromium-driver.')
        folder.mkdir()
        self._log = open(folder / 'chromedriver.log', 'w+')  # noqa: SIM115
        self._process = subprocess.Popen([driver, '--port=0'], stdout=self._log, stderr=subprocess.STDOUT)
        self._base = f'http://127.0.0.1:{self._find_port()}'
        options: Any = {'args': [*_FLAGS, f'--user-data-dir={folder / "profile"}', f'--window-size={width},{height}']}
        metrics = {'width': width, 'height': height, 'pixelRatio': 1, 'touch': width < 500}
        options['mobileEmulation'] = {'deviceMetrics': metrics}
        capabilities = {'alwaysMatch': {'browserName': 'chrome', 'goog:chromeOptions': options}}
        session = self._call('POST', '/session', {'capabilities': capabilities})
        self._base += f'/session/{session["sessionId"]}'

    def _find_port(self) -> int:
        for _ in range(300):
            self._log.seek(0)
            _, found, rest = self._log.read().partition('successfully on port ')
            if found and '.' in rest:
                return int(rest.partition('.')[0])
            time.sleep(0.1)
        raise RuntimeError('chromedriver did not start.')

    def _call(self, method: str, path: str, body: Optional[dict] = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {'Content-Type': 'application/json'}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)['value']
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)['value']['message']) from None

    def open(self, url: str) -> None:
        self._call('POST', '/url', {'url': url})

    def run(self, script: str) -> Any:
        """Run JavaScript; `return` a value."""
        return self._call('POST', '/execute/sync', {'script': script, 'args': []})

    def wait(self, condition: str, seconds: float = 60) -> Any:
        """Wait until an expression of JavaScript is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(f'return {condition}')):
            if time.monotonic() > end:
                raise TimeoutError(f'{condition} is still {value!r}')
            time.sleep(0.1)
        return value

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector('{selector}').innerText")

    def upload(self, selector: str, path: Path) -> None:
        """Choose a file, as a user does."""
        element = self._call('POST', '/element', {'using': 'css selector', 'value': selector})[_ELEMENT]
        self._call('POST', f'/element/{element}/value', {'text': str(path)})

    def log(self) -> List[str]:
        """Errors and warnings of the page, since the last call."""
        return [entry['message'] for entry in self._call('POST', '/se/log', {'type': 'browser'})]

    def screenshot(self, path: Path, full: bool = True) -> None:
        """Write a PNG of the page, in full or of its visible part."""
        body = {'cmd': 'Page.captureScreenshot', 'params': {'captureBeyondViewport': full}}
        if full:
            size = self.run('return [innerWidth, document.documentElement.scrollHeight]')
            body['params']['clip'] = dict(x=0, y=0, width=size[0], height=size[1], scale=1)
        path.write_bytes(base64.b64decode(self._call('POST', '/goog/cdp/execute', body)['data']))

    def close(self) -> None:
        try:
            self._call('DELETE', '')
        finally:
            self._process.terminate()
            self._process.wait()
            self._log.close()
