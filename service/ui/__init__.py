"""The live pages: jobs in a browser, with NiceGUI. See service/README.md."""
