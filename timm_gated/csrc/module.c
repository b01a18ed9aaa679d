/* An empty Python module, so that Python finds and pip installs the shared library. Its functions are called through
 * ctypes. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = 0};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
