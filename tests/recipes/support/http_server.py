"""A server of files on this machine, so that downloads are tested without a network."""

import contextlib
import functools
import http.server
import os
import threading
from unittest import mock


class _Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *unused):
    pass


class Cut(_Quiet):
  """Promises a file of 1,000 bytes, sends ten, and hangs up."""

  def do_GET(self):
    self.send_response(200)
    self.send_header("Content-Length", "1000")
    self.end_headers()
    self.wfile.write(bytes(10))


@contextlib.contextmanager
def serving(folder, handler=_Quiet):
  """Serves the files of a folder while the context lasts; yields the address, "http://host:port"."""
  make = functools.partial(handler, directory=str(folder))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
      # Through a proxy this machine's own address would be another machine's.
      with mock.patch.dict(os.environ, no_proxy="127.0.0.1", NO_PROXY="127.0.0.1"):
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
      server.shutdown()
      thread.join()
