"""Partitioners, which determine where arrays are placed: on one device or across a mesh."""

from jaxloop.partition.laid_out import ExplicitPartitioner as ExplicitPartitioner
from jaxloop.partition.laid_out import FSDPPartitioner as FSDPPartitioner
from jaxloop.partition.laid_out import RulesPartitioner as RulesPartitioner
from jaxloop.partition.laid_out import SPMDPartitioner as SPMDPartitioner
from jaxloop.partition.mesh_partitioner import DataParallelPartitioner as DataParallelPartitioner
from jaxloop.partition.mesh_partitioner import MeshPartitioner as MeshPartitioner
from jaxloop.partition.meshes import constrain as constrain
from jaxloop.partition.meshes import create_mesh as create_mesh
from jaxloop.partition.meshes import is_cpu_mesh as is_cpu_mesh
from jaxloop.partition.meshes import max_steps_in_flight as max_steps_in_flight
from jaxloop.partition.meshes import mesh_for_tracing as mesh_for_tracing
from jaxloop.partition.partitioner import Partitioner as Partitioner
from jaxloop.partition.partitioner import Rules as Rules
from jaxloop.partition.partitioner import SingleDevicePartitioner as SingleDevicePartitioner
