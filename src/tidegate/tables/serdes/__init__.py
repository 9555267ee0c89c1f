"""Serdes: conversion between bytes and values, one at a time and by column."""
