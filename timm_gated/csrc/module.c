/* An empty Python module: it makes the shared library one that Python finds and pip installs. What is in it is called
 * through ctypes, so that building needs nothing but a C compiler and Python's headers. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = 0};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
