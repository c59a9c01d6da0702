"""The live page: jobs in a browser, by NiceGUI; see service/README.md."""
