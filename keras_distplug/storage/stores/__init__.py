"""The supported kinds of stores. Their modules are imported when one of their URLs is opened."""
